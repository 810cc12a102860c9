"""The addresses of the live page, what each answers, and the hub that tells of what is new.

========================  ====================================================================
``/``                     all runs
``/run/ID``               one run
``/compare?a=ID&b=ID``    two runs side by side
``/overlay?run=ID&run=…`` any number of runs over each other
``/api/…``                the same as JSON: what a page lacks that has the version ``?since=``
``/events?topic=&have=``  tells a page that there is something new (server-sent events)
``/assets/…``             scripts and style
========================  ====================================================================
"""

import asyncio
import functools
import zlib
from collections import Counter
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

from rankscope.web.live.board import RUNS, Board, compare_topic, overlay_topic, run_topic
from rankscope.web.live.guard import Guard
from rankscope.web.live.sheets import (
    GZIP_LEVEL,
    asset,
    news_of,
    packed,
    page_of,
    start_of,
    words_sheet,
)

_T = TypeVar("_T")

POLL_SECONDS = 1.0
"""Seconds between two looks at what pages listen to."""
_COST = 5.0
"""The same as a multiple of what a look took: a slow disk is not kept busy."""

_PING_SECONDS = 15
_FOR_GOOD = "public, max-age=31536000, immutable"
_HTML = "text/html; charset=utf-8"
_COMPRESSED = {"content-encoding": "gzip"}
_GZIP_FORMAT = 31
"""The format's number in zlib."""


class Hub:
    """Listeners by topic, and the one task that looks for news.

    Args:
        version_of: Returns the version of a topic's page now, None if there is none. It may take
            its time: it runs in another thread.
        poll_seconds: Seconds between two looks.
    """

    def __init__(
        self, version_of: Callable[[str], str | None], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._version_of = version_of
        self._poll_seconds = poll_seconds
        self._listeners: Counter[str] = Counter()
        self._versions: dict[str, str | None] = {}
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def follow(self, topic: str, have: str) -> AsyncIterator[dict[str, str]]:
        """Yield an event whenever a page's version is not the one that it has.

        The first is ``hello``. After the first look comes ``news``, or ``current`` if there is
        none, and then ``news`` only.

        Args:
            topic: What the page shows.
            have: The version that it shows.
        """
        told = False
        self._listeners[topic] += 1
        try:
            yield {"event": "hello", "data": topic}
            while not self._closed:
                self._start()
                await self._looked.wait()
                version = self._versions.get(topic)
                if version is None or self._closed or (told and version == have):
                    continue
                event = "current" if version == have else "news"
                have, told = version, True
                yield {"event": event, "data": version}
        finally:
            self._listeners[topic] -= 1
            if not self._listeners[topic]:
                del self._listeners[topic]
                self._versions.pop(topic, None)

    def close(self) -> None:
        """End all streams; call it in the event loop."""
        self._closed = True
        self._looked.set()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._listeners and not self._closed:
            began = loop.time()
            topics = list(self._listeners)
            found = await asyncio.gather(
                *(anyio.to_thread.run_sync(self._version_of, topic) for topic in topics),
                return_exceptions=True,
            )
            for topic, version in zip(topics, found, strict=True):
                if not isinstance(version, BaseException):
                    self._versions[topic] = version
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(max(self._poll_seconds, _COST * (loop.time() - began)))


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
        Route("/overlay", pages.page),
        Route("/api/runs", pages.news),
        Route("/api/run/{id:path}", pages.news),
        Route("/api/compare", pages.news),
        Route("/api/overlay", pages.news),
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
    if path == "/overlay":
        return overlay_topic(request.query_params.getlist("run"))
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
