"""The end of a watched script: its run is closed, and one line says where it lies."""

import atexit
import builtins
import contextlib
import functools
import multiprocessing
import os
import shlex
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.integrations.job import PID_VARIABLE, Job

if TYPE_CHECKING:
    from rankscope.integrations.beginning import Watching

NOTHING = (
    "nothing was watched: the script trained no model wrapped in DistributedDataParallel or "
    "fully_shard, and no DeepSpeed engine"
)


ALONE = (
    "nothing was watched: each of {processes} processes (WORLD_SIZE) trained a model of its own, "
    "for torch.distributed was never initialised; call torch.distributed.init_process_group and "
    "wrap the model in DistributedDataParallel"
)


class Ending:
    """Closes the scope of a script in time."""

    def __init__(self) -> None:
        self._watching: Watching | None = None
        self._pid = 0
        self._exit_code: Any = None

    def attach(self, watching: "Watching") -> None:
        """Close the run when the process ends, or its process group before."""
        self._watching, self._pid = watching, os.getpid()
        atexit.register(self._finish)
        if multiprocessing.parent_process() is not None:  # which may end without atexit
            util.Finalize(self, self._finish, exitpriority=100)

    def notice_exit_codes(self) -> None:
        """Remember the code that the script ends itself with: a run that fails is incomplete.

        It is that of ``sys.exit``, and of ``exit`` and ``quit`` of Python's ``site``.
        """
        leave = sys.exit

        def exit(status: Any = None, /) -> None:  # noqa: A001 the name that it has
            self._notice(status)
            leave(status)

        exit.__doc__ = leave.__doc__
        sys.exit = exit  # type: ignore[assignment]
        quitter: Any = type(vars(builtins).get("exit"))
        if quitter.__name__ == "Quitter":  # both names are objects of this class
            call = quitter.__call__

            @functools.wraps(call)
            def quit_noticed(own: Any, code: Any = None) -> None:
                self._notice(code)
                call(own, code)

            quitter.__call__ = quit_noticed

    def _notice(self, status: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._exit_code = status

    def before_destroying(self, group: Any) -> None:
        """Take notice that the script destroys a process group; None for all of them."""
        if self._watching is None or self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):
            from torch.distributed import GroupMember

            if group is None or group == GroupMember.WORLD:
                self._watching.close(self._error())

    def _finish(self) -> None:
        """Close the run and say where it lies."""
        watching, self._watching = self._watching, None
        if watching is None or self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):
            watching.close(self._error())
            if watching.scope.run_dir is not None:
                path = _short(watching.scope.run_dir)
                show = f"rankscope report {shlex.quote(path)}"
                say(f"the run is recorded in {path}; to see it: {show}")

    def _error(self) -> BaseException | None:
        """Return what ends the script, if it is no success."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is None and self._exit_code not in (None, 0):
            error = SystemExit(self._exit_code)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return None
        return error


def tell_if_nothing_was_watched() -> None:
    """Say so at the end of the process that the command started, on rank 0.

    Processes that it started may have been watched in its place: those of this host have told it,
    and those of others may have left a run here.
    """
    if os.environ.get(PID_VARIABLE) != str(os.getpid()):  # a fork of it
        return
    job = Job.of_this_process()
    if not job.tell() or os.environ.get("RANK", "0") != "0":
        return
    path = Path(job.run_dir)
    files = [path / "run.json", *path.parent.glob(f"{path.name}-*/run.json")]
    if not any(file.exists() and file.stat().st_mtime >= job.started - 2 for file in files):
        say(NOTHING)


def tell_of_lone_training(job: Job, has_group: Callable[[], bool]) -> None:
    """Say at the end of this process that it has trained by itself, one of several; on rank 0.

    Args:
        job: What was asked for.
        has_group: Returns whether there is a process group after all.
    """
    pid = os.getpid()

    def tell() -> None:
        if pid != os.getpid() or has_group():
            return
        job.tell()
        if os.environ.get("RANK", "0") == "0":
            say(ALONE.format(processes=os.environ["WORLD_SIZE"]))

    atexit.register(tell)


def say(message: str) -> None:
    """Write a line to the script's error stream, if it is still open."""
    with contextlib.suppress(Exception):
        print(f"rankscope: {message}", file=sys.stderr, flush=True)


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
