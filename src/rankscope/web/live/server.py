"""Runs the live page: an address to listen on, and an end at once when it is asked to."""

import asyncio
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from urllib.parse import quote

import uvicorn

from rankscope.errors import UsageError
from rankscope.record.files import is_directory
from rankscope.web.live.app import POLL_SECONDS, Hub, make_app
from rankscope.web.live.board import REFRESH_SECONDS, Board
from rankscope.web.live.guard import is_loopback
from rankscope.web.live.sheets import addresses, asset

_LAST_SECONDS = 1


class LiveServer(uvicorn.Server):
    """A server of one directory, listening already when it is made; ``run`` serves.

    Args:
        directory: A run, or a directory with runs.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: What viewers must know. None: nothing on the loopback address, a random one else.
        poll_seconds: Seconds between two looks for what is new.
        refresh_seconds: Seconds between two readings of a changed run, at least.

    Attributes:
        token: What viewers must know, None for nothing.
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
    ) -> None:
        if not is_directory(directory):
            raise UsageError(
                f"there is no directory {directory}: name a run or one that holds runs"
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
                access_log=False,
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )

    def serve_until_stopped(self, *, browser: bool = False) -> None:
        """Serve until a signal comes; Ctrl-C then raises KeyboardInterrupt.

        Args:
            browser: Open the first page in this machine's browser.
        """
        threading.Thread(target=self._warm_up, daemon=True).start()
        if browser:
            threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()
        self.run(sockets=[self._socket])

    def _warm_up(self) -> None:
        """Make what takes seconds, before a page asks for it: the large script, the first runs."""
        asset(addresses()["vega.js"].split("/")[2], "vega.js")
        self._board.read_ahead()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that pages listen to, then what is left."""
        self._hub.close()
        await asyncio.sleep(0)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
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
