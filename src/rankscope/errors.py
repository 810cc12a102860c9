"""The errors that rankscope shows to its users, in one tree.

::

    RankscopeError                 every error of rankscope; the command line prints it in one line
    ├── UsageError (ValueError)    an argument or option that cannot work
    ├── DataError (ValueError)     a data file or record that cannot be used
    ├── RunError (ValueError)      a run directory that cannot be read or written
    │   ├── files: RunTakenError (another job has begun a run in the directory)
    │   └── wrappers.rendezvous: LateError (a rank does not call ``watch``)
    ├── UnsupportedError           a way of training that cannot be watched (yet)
    ├── MissingExtraError          an optional dependency that is not installed
    ├── lab.study.launch: StudyInterrupted, WorkerFailedError
    ├── evidence.canary.batch: CanaryDeclined (a model or batch that no canary can run)
    ├── evidence.canary.state: NotPutBackError (state that a canary has changed)
    └── agent: LinkError, FrameError, MessageError, HostsError; these never leave the monitor

Each message has the expected value, the actual one, and the remedy. None of them is raised into a
training loop after ``watch`` has returned: from then on the monitor disables itself instead.
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


def lacks(error: ImportError, *packages: str) -> bool:
    """Return whether an import failed since a package is not installed, and nothing else."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return (name or "").partition(".")[0] in packages


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where this installation came from.

    Args:
        extra: One of the extras of ``pyproject.toml``.
    """
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Return pip's requirement of this project with an extra, from its origin (PEP 610)."""
    named = f"rankscope[{extra}]"
    try:
        text = metadata.distribution("rankscope").read_text("direct_url.json")
        origin = json.loads(text) if text else {}
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
