"""The live page over one or many runs: ``rankscope serve``.

It needs the extra ``serve``; importing this package does not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.report import needs_extra

if TYPE_CHECKING:
    from rankscope.report.live.server import LiveServer

__all__ = ["live_server"]


def live_server(directory: Path, **options: Any) -> "LiveServer":
    """Return a server of the live page, see ``server.LiveServer``; it listens already.

    Raises:
        MissingExtraError: The extra ``serve`` is not installed.
        UsageError: The directory does not exist, or the address cannot be listened on.
    """
    with needs_extra("rankscope serve", "serve"):
        from rankscope.report.live.server import LiveServer
    return LiveServer(directory, **options)
