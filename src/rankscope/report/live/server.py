"""Runs the live page: an address to listen on, and an end at once on request."""

import asyncio
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankscope.errors import UsageError
from rankscope.files import is_directory
from rankscope.report.live.app import POLL_SECONDS, Hub, is_loopback, make_app
from rankscope.report.live.board import REFRESH_SECONDS, Board
from rankscope.report.live.sheets import addresses, asset

_LAST_SECONDS = 1
_TOKEN_SIGNS = 512

REQUEST_SECONDS = 15.0
"""Seconds that a viewer has to send a request, from its first byte or its connection on, and to
take some more of an answer."""

MAX_CONNECTIONS = 256  # for another one, the oldest ends; a browser opens up to six of a page


class _Protocol(H11Protocol):
    """HTTP that leaves a viewer who does not finish a request, or takes nothing of an answer.

    It waits ``seconds`` for either; ``opened`` are the server's open connections, oldest first.
    """

    seconds = REQUEST_SECONDS
    opened: dict["_Protocol", None]
    _late: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.opened[self] = None
        if len(self.opened) > MAX_CONNECTIONS:
            oldest = next(iter(self.opened))
            del self.opened[oldest]
            oldest.transport.abort()
        self._watch()
        self._look = self.loop.call_later(self.seconds, self._look_at_answer)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.opened.pop(self, None)
        self._stop_watching()
        if self._look is not None:
            self._look.cancel()

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._stop_watching()
        elif self._late is None:
            self._late = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None

    def _look_at_answer(self) -> None:
        """Leave a viewer who has taken nothing since the last look; closing would wait for it."""
        before = self._unsent
        self._unsent = self.transport.get_write_buffer_size()
        if 0 < before <= self._unsent:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(self.seconds, self._look_at_answer)


class LiveServer(uvicorn.Server):
    """A server of one directory, listening already when it is made; ``run`` serves.

    Args:
        directory: A run, or a directory with runs.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: What viewers must give. None: nothing on the loopback address, a random one else.
        poll_seconds: Seconds between two looks for what is new.
        refresh_seconds: Seconds between two readings of a changed run, at least.
        request_seconds: Seconds that a viewer has to send a request, and to take some of an answer.

    Attributes:
        token: What viewers must give, None for nothing.
        url: Where the first page is.

    Raises:
        UsageError: The directory does not exist, or the address cannot be listened on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8321,
        token: str | None = None,
        poll_seconds: float = POLL_SECONDS,
        refresh_seconds: float = REFRESH_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        if not is_directory(directory):
            why = "is a file" if directory.is_file() else "is not there"
            raise UsageError(f"{directory} {why}: name the directory of a run, or one of runs")
        if token and not (token.isprintable() and len(token) <= _TOKEN_SIGNS):
            raise UsageError(
                f"--token expected up to {_TOKEN_SIGNS} printable characters, got {token[:40]!a}: "
                "choose another, or leave it out and one is made"
            )
        own = is_loopback(host)
        self.token = token or (None if own else secrets.token_urlsafe(16))
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = _url(host, self.port, self.token)
        self._board = Board(directory, refresh_seconds=refresh_seconds)
        self._hub = Hub(
            lambda topic: getattr(self._board.sheet(topic), "version", None), poll_seconds
        )
        app = make_app(self._board, self._hub, token=self.token, own_names_only=own)
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (_Protocol,), {"seconds": request_seconds, "opened": {}}),
                access_log=False,
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )

    def serve_until_stopped(self, *, browser: bool = False) -> None:
        """Serve until a signal comes; Ctrl-C then raises KeyboardInterrupt."""
        threading.Thread(target=self._warm_up, daemon=True).start()
        if browser:
            threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()
        self.run(sockets=[self._socket])

    def _warm_up(self) -> None:
        """Make the slow parts before the first request: the large script, the first runs."""
        asset(addresses()["vega.js"].split("/")[2], "vega.js")
        self._board.read_ahead()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams of open pages, then the rest."""
        self._hub.close()
        await asyncio.sleep(0)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError, ValueError) as error:  # a name that is no text is a value
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {host} port {port} ({reason}): name another port with --port, "
            "or 0 for any that is free"
        ) from error


def _url(host: str, port: int, token: str | None) -> str:
    everywhere = host in ("", "0.0.0.0", "::")
    name = socket.gethostname() if everywhere else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={quote(token)}" if token else "")
