"""The errors that rankscope shows to its users, in one tree.

::

    RankscopeError                 every error that is ours; the command line prints it in one line
    ├── UsageError (ValueError)    an argument or option that cannot work
    ├── DataError (ValueError)     a data file or record that cannot be used
    ├── RunError (ValueError)      a run directory that cannot be read or written
    │   └── record: RunTakenError (another job has begun a run in the directory)
    ├── UnsupportedError           a way of training that cannot be watched (yet)
    ├── MissingExtraError          an optional dependency that is not installed
    ├── study.launch: StudyInterrupted, WorkerFailedError
    ├── meeting: LateError (a rank that does not call ``watch``); the training goes on unwatched
    ├── capture.canary_batch: CanaryDeclined (a model or batch that no canary can run)
    ├── capture.canary_state: NotPutBackError (what a canary has changed)
    └── agent: LinkError, FrameError, MessageError, HostsError; these never leave the monitor

Each message says what was expected, what came, and what to do. None of them is ever raised into
a training loop after ``watch`` has returned: from then on the monitor disables itself instead.
"""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname


class RankscopeError(Exception):
    """Base of all errors that rankscope raises on purpose."""


class UsageError(RankscopeError, ValueError):
    """An argument or option cannot work."""


class DataError(RankscopeError, ValueError):
    """A data file, or a record in it, cannot be used."""


class RunError(RankscopeError, ValueError):
    """A run directory cannot be read or written."""


class UnsupportedError(RankscopeError):
    """A way of training cannot be watched."""


class MissingExtraError(RankscopeError):
    """An optional dependency is missing.

    Args:
        what: What needs it, as the subject of a sentence: ``"rankscope study"``.
        extra: The extra to install: ``"study"``.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed: run {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where this installation came from.

    Args:
        extra: One of the extras of ``pyproject.toml``.
    """
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Return what pip calls this project, with an extra: PEP 610 tells where it came from."""
    named = f"rankscope[{extra}]"
    try:
        told = metadata.distribution("rankscope").read_text("direct_url.json")
        origin = json.loads(told) if told else {}
        url = str(origin["url"]) if origin else ""
    except (metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return named
    if not url:
        return named
    folder = url2pathname(urlparse(url).path)
    if url.startswith("file:") and Path(folder).is_dir():
        return f"{folder}[{extra}]"
    control = origin.get("vcs_info", {}).get("vcs")
    return f"{named} @ {control}+{url}" if control else f"{named} @ {url}"
