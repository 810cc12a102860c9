"""``rankscope run``: becomes the training script, in an environment in which it is watched.

The job's options go to its processes through that environment.

The process that the command started *is* the script afterwards (``exec``): its number, arguments,
signals, exit code and ``__main__`` are those of a script that was started without rankscope.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rankscope.errors import UsageError

VARIABLE = "RANKSCOPE_RUN"  # the job as JSON; inherited by all processes that the script starts
_OFF = "0"  # given by the user in that variable: the script is not watched

PID_VARIABLE = "RANKSCOPE_RUN_PID"  # the process that the command became

STARTUP = Path(__file__).parent / "startup"  # its only module Python imports at its start

_AS_MODULE = re.compile(r"-([A-Za-z]*)m(.*)")


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script that is to be watched, with further options of :func:`rankscope.watch`.

    ``run_dir`` is absolute: scripts may change their working directory. The file ``unreported``
    exists until a process of this host knows whether it is watched (empty if none could be made).
    ``parity`` are options of a record for ``rankscope parity``, which then stands in the place of
    the monitor; see :class:`rankscope.integrations.parity.ParityJob`.
    """

    run_dir: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    unreported: str = ""
    parity: dict[str, Any] | None = None

    def to_environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return an environment in which Python processes look for a training to watch."""
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(STARTUP), *(path for path in before if path and path != str(STARTUP))]
        return {
            **environment,
            "PYTHONPATH": os.pathsep.join(paths),
            VARIABLE: json.dumps(asdict(self)),
            PID_VARIABLE: str(os.getpid()),
        }

    def mark_reported(self) -> bool:
        """Remove the job's file; return whether no process of this host did before."""
        try:
            Path(self.unreported).unlink()
        except OSError:
            return False
        return True

    @classmethod
    def of_this_process(cls) -> "ScriptJob":
        """Return the job that this process belongs to; KeyError if it belongs to none."""
        return cls(**json.loads(os.environ[VARIABLE]))


def command_for(words: Sequence[str], *, module: bool, original: Sequence[str]) -> list[str]:
    """Return the command line of the training; UsageError without such a script or command.

    ``words`` are the script, module or command, and its arguments; ``original`` is the command line
    of this Python, whose own flags (``-u``, ``-X …``) are kept.
    """
    if not words:
        raise UsageError("rankscope run expected a script and its arguments, got nothing")
    python = [sys.executable, *interpreter_flags(original, sys.argv[1:])]
    if module:
        return [*python, "-m", *words]
    beside = str(Path(sys.executable).parent)  # of an environment that is not activated
    script = Path(words[0])
    command = shutil.which(words[0]) or shutil.which(words[0], path=beside)
    runs_itself = command is not None and script.suffix not in {".py", ".pyc", ".pyz"}
    if runs_itself:
        return [str(command), *words[1:]]
    if not script.exists():
        raise UsageError(
            f"expected a script or a command, got {words[0]!r}, which is neither a "
            "file here nor a command; for a module, write -m before its name"
        )
    if script.is_dir() and not (script / "__main__.py").exists():
        raise UsageError(f"expected a script or a command, got {words[0]!r}, which is a directory")
    return [*python, *words]


def interpreter_flags(original: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return Python's own flags from its command line, whose last part are ``arguments``."""
    head = list(original[1 : len(original) - len(arguments)])
    if not head:
        return []
    program = head.pop()
    joined = _AS_MODULE.fullmatch(program)
    if joined is None and head:
        joined = _AS_MODULE.fullmatch(head[-1])
        if joined is None or joined[2]:
            return head  # a script, such as the command ``rankscope`` itself
        head.pop()
    if joined is not None and joined[1]:
        head.append(f"-{joined[1]}")
    return head


def name_of(words: Sequence[str], *, module: bool) -> str:
    """Return the script's short name; a launcher's is that of the script it starts.

    Example:
        >>> name_of(["torchrun", "--nproc-per-node", "8", "src/train.py"], module=False)
        'train'
        >>> name_of(["project.train"], module=True)
        'train'
    """
    if module:
        return words[0].rpartition(".")[2]
    scripts = [word for word in words if word.endswith(".py")]
    return Path(words[0] if words[0].endswith(".py") or not scripts else scripts[0]).stem


def check_interpreter() -> None:
    """Raise a UsageError if Python will not import from the startup folder."""
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError(
            "rankscope run reaches the script through Python's environment, which the flags -I, "
            "-E and -S switch off; start python without them"
        )


def become(command: Sequence[str], job: ScriptJob) -> None:
    """Replace this process by the training; UsageError if that fails."""
    environment = dict(os.environ)
    if environment.get(VARIABLE) == _OFF:
        if environment.get("RANK", "0") == "0":
            print(f"rankscope: not watched, since {VARIABLE} is {_OFF}", file=sys.stderr)
    else:
        job = replace(job, unreported=_new_file())
        environment = job.to_environment(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], list(command), environment)
    except OSError as error:
        job.mark_reported()
        raise UsageError(f"rankscope run cannot start {command[0]}: {error.strerror}") from error


def _new_file() -> str:
    """Return the path of an empty file for :attr:`ScriptJob.unreported`."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="rankscope-run-")
    except OSError:
        return ""
    os.close(descriptor)
    return path
