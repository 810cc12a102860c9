"""The addresses of the live page, and what each answers.

========================  ====================================================================
``/``                     all runs
``/run/ID``               one run
``/compare?a=ID&b=ID``    two runs side by side
``/api/…``                the same as JSON: what a page lacks that has the version ``?since=``
``/events?topic=&have=``  tells a page that there is something new (server-sent events)
``/assets/…``             scripts and style
========================  ====================================================================
"""

import functools
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from urllib.parse import quote

import anyio.to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rankscope.web.live.assets import asset
from rankscope.web.live.board import RUNS, Board, compare_topic, run_topic
from rankscope.web.live.guard import Guard
from rankscope.web.live.hub import Hub
from rankscope.web.live.sheets import GZIP_LEVEL, news_of, packed, page_of, start_of, words_sheet

_T = TypeVar("_T")

_PING_SECONDS = 15
_FOR_GOOD = "public, max-age=31536000, immutable"
_HTML = "text/html; charset=utf-8"
_COMPRESSED = {"content-encoding": "gzip"}
_GZIP_FORMAT = 31
"""The format's number in zlib."""


def make_app(
    board: Board, hub: Hub, *, token: str | None = None, own_names_only: bool = True
) -> ASGIApp:
    """Return the pages of a served directory as an ASGI application.

    Args:
        board: Makes what they show.
        hub: Tells them what is new.
        token: What a viewer must know; None when it is not needed.
        own_names_only: Whether the ``Host`` header must name the loopback address.
    """
    pages = _Pages(board, hub)
    routes = [
        Route("/", pages.runs),
        Route("/run/{id:path}", pages.page),
        Route("/compare", pages.page),
        Route("/api/runs", pages.news),
        Route("/api/run/{id:path}", pages.news),
        Route("/api/compare", pages.news),
        Route("/events", pages.events),
        Route("/assets/{tag}/{name}", pages.asset),
    ]
    handlers: Any = {404: _nothing_here, 500: _broken}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, token=token, own_names_only=own_names_only)


class _Pages:
    """Answers requests; everything that takes time runs in another thread."""

    def __init__(self, board: Board, hub: Hub) -> None:
        self._board = board
        self._hub = hub

    async def runs(self, request: Request) -> Response:
        only = await _elsewhere(self._board.only_run)
        if only is not None:
            return RedirectResponse(f"/run/{quote(only)}", 307)
        return await self.page(request)

    async def page(self, request: Request) -> Response:
        topic = _topic_of(request)
        if not await _elsewhere(functools.partial(self._board.has, topic)):
            return await _nothing_here(request)
        return StreamingResponse(self._page(topic), headers=_COMPRESSED, media_type=_HTML)

    async def _page(self, topic: str) -> AsyncIterator[bytes]:
        """Yield a page: how it begins at once, so that scripts are loaded while a run is read."""
        packing = zlib.compressobj(GZIP_LEVEL, wbits=_GZIP_FORMAT)
        start = await _elsewhere(functools.partial(start_of, topic))
        yield packing.compress(start.encode()) + packing.flush(zlib.Z_SYNC_FLUSH)

        def rest() -> bytes:
            page = page_of(self._board.sheet(topic) or _NO_RUN, topic)
            return packing.compress(page.removeprefix(start).encode()) + packing.flush()

        yield await _elsewhere(rest)

    async def news(self, request: Request) -> Response:
        topic, since = _topic_of(request), request.query_params.get("since", "")

        def make() -> tuple[int, bytes]:
            sheet = self._board.sheet(topic)
            if sheet is None:
                return 404, packed("{}")
            return 200, packed(news_of(sheet, self._board.figures_of(since)))

        status, content = await _elsewhere(make)
        return _compressed(content, "application/json", status)

    async def events(self, request: Request) -> Response:
        topic = request.query_params.get("topic", "")
        if await _elsewhere(lambda: self._board.sheet(topic) if topic else None) is None:
            return Response(status_code=404)
        stream = self._hub.follow(topic, request.query_params.get("have", ""))
        return EventSourceResponse(stream, ping=_PING_SECONDS, ping_message_factory=_ping)

    async def asset(self, request: Request) -> Response:
        tag, name = request.path_params["tag"], request.path_params["name"]
        found = await _elsewhere(functools.partial(asset, tag, name))
        if found is None:
            return Response(status_code=404)
        headers = {"cache-control": _FOR_GOOD}
        return _compressed(found.content, f"{found.kind}; charset=utf-8", 200, headers)


_NO_RUN = words_sheet(
    "There is no such page",
    "The run may have been renamed or removed. The first page lists all runs that are here.",
)


def _ping() -> ServerSentEvent:
    """Return what tells a page that the stream is alive; a comment would not reach its script."""
    return ServerSentEvent("ping", event="ping")


async def _elsewhere(work: Callable[[], _T]) -> _T:
    return await anyio.to_thread.run_sync(work)


def _topic_of(request: Request) -> str:
    path = request.url.path.removeprefix("/api")
    if path.startswith("/run/"):
        return run_topic(request.path_params["id"])
    if path == "/compare":
        return compare_topic(request.query_params.get("a", ""), request.query_params.get("b", ""))
    return RUNS


def _compressed(
    content: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(content, status, {**_COMPRESSED, **(headers or {})}, media_type=kind)


async def _nothing_here(request: Request, error: Exception | None = None) -> Response:
    page = await _elsewhere(lambda: packed(page_of(_NO_RUN, "")))
    return _compressed(page, _HTML, 404)


async def _broken(request: Request, error: Exception) -> Response:
    return Response("This page cannot be shown; see the terminal of rankscope serve.", 500)
