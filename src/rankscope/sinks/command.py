"""A shell command for each finding that opens, gets worse or closes."""

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import weakref
from typing import IO

from rankscope.bus.finding import Finding, FindingEvent
from rankscope.sinks.base import NewsSink, plain_finding

_log = logging.getLogger("rankscope")

SECONDS = 30.0  # a command that takes longer is killed, with its child processes


class CommandSink(NewsSink):
    """Runs a command with the finding as JSON on its standard input.

    The same is in its environment, for commands of one line: ``RANKSCOPE_EVENT`` (``opened``,
    ``got worse``, ``closed``), ``RANKSCOPE_RUN_DIR``, ``RANKSCOPE_ID``, ``RANKSCOPE_CAUSE``,
    ``RANKSCOPE_SEVERITY``, ``RANKSCOPE_RANKS`` (``0,3``), ``RANKSCOPE_STEP``,
    ``RANKSCOPE_EXPLANATION`` and ``RANKSCOPE_NEXT_CHECK``. It writes where the training writes. No
    part of a finding is put into the command.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        self._running: subprocess.Popen[bytes] | None = None
        self._warned = False
        # Registered before the scope's own exit handler, so called after it.
        atexit.register(_kill_at_exit, weakref.ref(self), os.getpid())

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Run the command for a finding that opened, got worse or closed."""
        # A file, not a pipe: a process forked meanwhile would keep the pipe open.
        with _new_file() as content:
            content.write(json.dumps(plain_finding(finding)).encode())
            content.seek(0)
            self._running = subprocess.Popen(
                self._command,
                shell=True,  # it is the user's own command line
                stdin=content,
                env={**os.environ, **self._variables(finding, event)},
                start_new_session=True,
            )
        try:
            self._running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._running.wait()
            self._warn(f"took longer than {SECONDS:g} s and was killed")
            return
        if self._running.returncode:
            self._warn(f"ended with exit code {self._running.returncode}")

    def kill(self) -> None:
        """Kill the running command, if any, with its child processes."""
        if self._running is not None and self._running.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running.pid, signal.SIGKILL)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "sink command: it %s; it is run again for the next finding, and this warning is "
                "not repeated",
                problem,
            )

    def _variables(self, finding: Finding, event: FindingEvent) -> dict[str, str]:
        variables = {
            "EVENT": event,
            "RUN_DIR": self.run.run_dir,
            "ID": finding.id,
            "CAUSE": finding.cause,
            "SEVERITY": finding.severity,
            "RANKS": ",".join(map(str, finding.ranks)),
            "STEP": finding.step,
            "EXPLANATION": finding.explanation,
            "NEXT_CHECK": finding.next_check,
        }
        return {f"RANKSCOPE_{name}": str(value) for name, value in variables.items()}


def _new_file() -> IO[bytes]:
    """Return an empty file without a name: in memory if possible, since a disk may be full."""
    try:
        return os.fdopen(os.memfd_create("rankscope"), "w+b")
    except (AttributeError, OSError):  # not Linux, or forbidden
        return tempfile.TemporaryFile()


def _kill_at_exit(reference: "weakref.ref[CommandSink]", pid: int) -> None:
    sink = reference()
    if sink is not None and os.getpid() == pid:
        sink.kill()
