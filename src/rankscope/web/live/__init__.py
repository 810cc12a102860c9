"""The live page over one or many runs: ``rankscope serve``.

It needs the extra ``serve``; importing this package does not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.errors import MissingExtraError

if TYPE_CHECKING:
    from rankscope.web.live.server import LiveServer

_EXTRA = (
    *("starlette", "uvicorn", "sse_starlette", "anyio"),
    *("altair", "jinja2", "markupsafe", "vl_convert"),
)

__all__ = ["live_server"]


def live_server(directory: Path, **options: Any) -> "LiveServer":
    """Return a server of the live page, see ``server.LiveServer``; it listens already.

    Raises:
        MissingExtraError: The extra ``serve`` is not installed.
        UsageError: The directory does not exist, or the address cannot be listened on.
    """
    try:
        from rankscope.web.live.server import LiveServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRA:
            raise MissingExtraError("rankscope serve", "serve") from error
        raise
    return LiveServer(directory, **options)
