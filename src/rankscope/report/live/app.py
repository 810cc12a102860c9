"""The addresses of the live page, their answers, and the hub that announces changes.

========================  ====================================================================
``/``                     all runs
``/run/ID``               one run
``/compare?a=ID&b=ID``    two runs side by side
``/overlay?run=ID&run=…`` any number of runs over each other
``/api/…``                the same as JSON: the news for a page that has the version ``?since=``
``/events?topic=&have=``  events for a page that has an old version (server-sent events)
``/assets/…``             scripts and style
========================  ====================================================================
"""

import asyncio
import functools
import gzip
import hashlib
import hmac
import ipaddress
import re
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import anyio.to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope.report.live.board import RUNS, Board
from rankscope.report.live.sheets import (
    GZIP_LEVEL,
    Sheet,
    asset,
    news_of,
    packed,
    page_of,
    words_sheet,
)

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""As strict as the report's: figures compile their expressions and set styles of their own."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

_NO_TOKEN = (
    "<!doctype html><html lang=en><title>rankscope</title>"
    "<p>This page needs the token that <code>rankscope serve</code> printed when it was started. "
    "Open the address that it printed, which ends in <code>?token=…</code>."
)

_GO_ON = (
    "<!doctype html><html lang=en><title>rankscope</title>"
    '<meta http-equiv=refresh content="0;url={address}">'
    '<p><a href="{address}">Go on to the page.</a>'
)


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on, or the name in a ``Host`` header, is this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class RequestGuard:
    """Answers requests that must not reach the pages, and adds the headers that bind a browser.

    On the loopback address the name in the ``Host`` header must be one of this machine's own
    (``own_names_only``): a page of another site that lets its name point to 127.0.0.1 gets nothing.
    Elsewhere a token is needed; it comes once in the address and then in a cookie that scripts
    cannot read, and that a browser sends only for a page of this server. After a link on another
    site, a redirect would still count as that site's request; so the answer to the token is a small
    page that goes on by itself.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, own_names_only: bool) -> None:
        self._app = app
        self._token = token
        self._own_names_only = own_names_only
        digest = hashlib.sha256(b"rankscope live page " + (token or "").encode()).hexdigest()
        self._cookie = f"rankscope_{digest[:8]}"
        self._cookie_value = digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or self._entry(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is only to be read.", 405, {"allow": "GET, HEAD"})
        if self._own_names_only and not is_loopback(_name_of(headers.get("host", ""))):
            return PlainTextResponse(
                "This page answers to localhost only: open it as http://localhost and its port, "
                "also through a forwarded port.",
                421,
            )
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """Return the answer to a viewer who lacks the token, or just brought it; None to go on."""
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        brought = [value for name, value in query if name == "token"]
        if brought:
            if not _equal(brought[-1], self._token):
                return HTMLResponse(_NO_TOKEN, 401)
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            address = quote("/" + scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            answer = HTMLResponse(_GO_ON.format(address=escape(address)))
            answer.set_cookie(
                self._cookie, self._cookie_value, httponly=True, samesite="strict", path="/"
            )
            return answer
        return None if self._has_cookie(scope) else HTMLResponse(_NO_TOKEN, 401)

    def _has_cookie(self, scope: Scope) -> bool:
        """Return whether the cookie is among those sent, whatever other programs have set there."""
        sent = ";".join(Headers(scope=scope).getlist("cookie")).split(";")
        pairs = (pair.strip().partition("=")[::2] for pair in sent)
        return any(n == self._cookie and _equal(v, self._cookie_value) for n, v in pairs)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _name_of(host: str) -> str:
    """Return the name in a ``Host`` header without its port; empty if it is malformed.

    >>> _name_of("localhost:8321"), _name_of("[::1]:80"), _name_of("localhost:80@evil.example")
    ('localhost', '[::1]', '')
    """
    found = _HOST.fullmatch(host)
    return found[1] if found else ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{0,5})?")


POLL_SECONDS = 1.0  # seconds between two looks for news of the topics of open pages
_COST = 5.0  # the same as a multiple of the time of a look: a slow disk is not kept busy

_PING_SECONDS = 15
_PING = functools.partial(ServerSentEvent, "ping", event="ping")
"""Makes the event that shows a page that the stream is alive; its script sees no comments."""

_FOR_GOOD = "public, max-age=31536000, immutable"
_HTML = "text/html; charset=utf-8"
_COMPRESSED = {"content-encoding": "gzip"}
_GZIP_FORMAT = 31  # the format's number in zlib


class Hub:
    """Listeners by topic, and the one task that looks for news.

    ``version_of`` returns the present version of a topic's page, None if there is none. It may
    take its time: it runs in another thread.
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
        """Yield an event whenever a page's version differs from ``have``.

        The first is ``hello``. After the first look comes ``news``, or ``current`` if there is
        none, and then ``news`` only.
        """
        sent = False
        self._listeners[topic] += 1
        try:
            yield {"event": "hello", "data": topic}
            while not self._closed:
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._look())
                await self._looked.wait()
                version = self._versions.get(topic)
                if version is None or self._closed or (sent and version == have):
                    continue
                event = "current" if version == have else "news"
                have = version
                sent = True
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
            looked = self._looked
            self._looked = asyncio.Event()
            looked.set()
            await asyncio.sleep(max(self._poll_seconds, _COST * (loop.time() - began)))


def make_app(
    board: Board, hub: Hub, *, token: str | None = None, own_names_only: bool = True
) -> ASGIApp:
    """Return the pages of a served directory as an ASGI application."""
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

    async def broken(request: Request, error: Exception) -> Response:
        return Response("This page cannot be shown; see the terminal of rankscope serve.", 500)

    handlers: Any = {404: _nothing_here, 500: broken}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return RequestGuard(app, token=token, own_names_only=own_names_only)


class _Pages:
    """Answers requests; everything slow runs in another thread."""

    def __init__(self, board: Board, hub: Hub) -> None:
        self._board = board
        self._hub = hub
        self._reading: dict[str, asyncio.Task[Sheet | None]] = {}

    async def _sheet(self, topic: str) -> Sheet | None:
        """Return the content of a page; None if there is no such page.

        One thread reads for all who wait for a page, also for those who have left: so viewers of
        one slow run never take the threads of other pages.
        """
        task = self._reading.get(topic)
        if task is None:
            task = asyncio.create_task(anyio.to_thread.run_sync(self._board.sheet, topic))
            self._reading[topic] = task
            task.add_done_callback(lambda _: self._reading.pop(topic, None))
        return await asyncio.shield(task)

    async def runs(self, request: Request) -> Response:
        only = await anyio.to_thread.run_sync(self._board.only_run)
        if only is not None:
            return RedirectResponse(f"/run/{quote(only)}", 307)
        return await self.page(request)

    async def page(self, request: Request) -> Response:
        topic = _topic_of(request)
        if not await anyio.to_thread.run_sync(self._board.has, topic):
            return await _nothing_here(request)
        if not _takes_gzip(request):
            sheet = await self._sheet(topic) or _NO_RUN
            return Response(await anyio.to_thread.run_sync(page_of, sheet, topic), media_type=_HTML)
        return StreamingResponse(self._page(topic), headers=_COMPRESSED, media_type=_HTML)

    async def _page(self, topic: str) -> AsyncIterator[bytes]:
        """Yield a page: how it begins at once, so that scripts are loaded while a run is read."""
        packing = zlib.compressobj(GZIP_LEVEL, wbits=_GZIP_FORMAT)
        empty = Sheet.of("", "")
        page = await anyio.to_thread.run_sync(page_of, empty, topic)
        start = page.partition("<title>")[0]  # scripts and style, whatever the page shows
        yield packing.compress(start.encode()) + packing.flush(zlib.Z_SYNC_FLUSH)

        sheet = await self._sheet(topic) or _NO_RUN

        def rest() -> bytes:
            page = page_of(sheet, topic)
            return packing.compress(page.removeprefix(start).encode()) + packing.flush()

        yield await anyio.to_thread.run_sync(rest)

    async def news(self, request: Request) -> Response:
        topic = _topic_of(request)
        since = request.query_params.get("since", "")

        sheet = await self._sheet(topic)
        if sheet is None:
            return _answer(request, packed("{}"), "application/json", 404)
        content = await anyio.to_thread.run_sync(
            lambda: packed(news_of(sheet, self._board.figures_of(since)))
        )
        return _answer(request, content, "application/json")

    async def events(self, request: Request) -> Response:
        topic = request.query_params.get("topic", "")
        if not topic or await self._sheet(topic) is None:
            return Response(status_code=404)
        stream = self._hub.follow(topic, request.query_params.get("have", ""))
        return EventSourceResponse(stream, ping=_PING_SECONDS, ping_message_factory=_PING)

    async def asset(self, request: Request) -> Response:
        tag = request.path_params["tag"]
        name = request.path_params["name"]
        found = await anyio.to_thread.run_sync(asset, tag, name)
        if found is None:
            return Response(status_code=404)
        headers = {"cache-control": _FOR_GOOD}
        return _answer(request, found.content, f"{found.kind}; charset=utf-8", 200, headers)


_NO_RUN = words_sheet(
    "There is no such page",
    "The run may have been renamed or removed. The first page lists all runs that are here.",
)


def _topic_of(request: Request) -> str:
    path = request.url.path.removeprefix("/api")
    if path.startswith("/run/"):
        return f"run:{request.path_params['id']}"
    if path == "/compare":
        return f"compare:{request.query_params.get('a', '')}:{request.query_params.get('b', '')}"
    if path == "/overlay":
        return f"overlay:{':'.join(request.query_params.getlist('run'))}"
    return RUNS


def _takes_gzip(request: Request) -> bool:
    """Return whether the client takes compressed answers, as each browser does."""
    return "gzip" in request.headers.get("accept-encoding", "")


def _answer(
    request: Request,
    content: bytes,
    kind: str,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a compressed content as the client takes it."""
    headers = {"vary": "accept-encoding", **(headers or {})}
    if not _takes_gzip(request):
        return Response(gzip.decompress(content), status, headers, media_type=kind)
    return Response(content, status, {**_COMPRESSED, **headers}, media_type=kind)


async def _nothing_here(request: Request, error: Exception | None = None) -> Response:
    page = await anyio.to_thread.run_sync(lambda: packed(page_of(_NO_RUN, "")))
    return _answer(request, page, _HTML, 404)
