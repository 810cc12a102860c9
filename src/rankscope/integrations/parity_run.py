"""Runs a training's command for ``rankscope parity``, and leaves nothing of it behind."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankscope.agent.processes import ending_of
from rankscope.errors import RunError
from rankscope.integrations.parity import ParityJob
from rankscope.integrations.run_script import VARIABLE, ScriptJob, command_for, name_of

GRACE_SECONDS = 10.0
"""How long processes may take to end after a signal."""

_LOG = "output.txt"
_MOST_WORDS = 200


class CommandError(RunError):
    """A training's command has failed, or did not end in time."""


@dataclass(slots=True)
class Command:
    """A training that is recorded.

    Args:
        name: Its name in messages.
        text: Its command line.
        directory: The run's directory, which must not hold a record.
        parity: What is recorded.
    """

    name: str
    text: str
    directory: Path
    parity: ParityJob
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it.

        Raises:
            CommandError: The command cannot be started.
            UsageError: There is no such script or command.
        """
        words = shlex.split(self.text)
        command = command_for(words, module=False, original=[sys.executable])
        self.directory.mkdir(parents=True, exist_ok=True)
        name = name_of(words, module=False)
        job = ScriptJob(str(self.directory.absolute()), name, parity=asdict(self.parity))
        with (self.directory / _LOG).open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=job.to_environment(dict(os.environ)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(f"{self.name} cannot be started: {error}") from error

    def wait(self, until: float) -> None:
        """Wait for its end.

        Args:
            until: Time of the monotonic clock at which it is ended.

        Raises:
            CommandError: It failed, or has not ended in time.
        """
        assert self._process is not None
        try:
            code = self._process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.end()
            raise CommandError(
                f"{self.name} had not ended in time and was ended; give a longer --timeout, or see "
                f"where it hangs: {self._last_words()}"
            ) from None
        self._end_others()
        if code:
            raise CommandError(f"{self.name} {ending_of(code)}: {self._last_words()}")

    def end(self) -> None:
        """End all its processes; does nothing after its end."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._end_others()

    def _end_others(self) -> None:
        """End processes that it has started in sessions of their own, as torchrun does."""
        for number in self._others():
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while (left := self._others()) and time.monotonic() < until:
            time.sleep(0.05)
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)

    def _others(self) -> list[int]:
        """Return the processes whose environment holds this job."""
        mark = f'"run_dir": "{self.directory.absolute()}"'.encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            if int(place.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = (place / "environ").read_bytes()
                if f"{VARIABLE}=".encode() in environment and mark in environment:
                    found.append(int(place.name))
        return found

    def _last_words(self) -> str:
        """Return the last lines that name an error, or the last one at all."""
        with contextlib.suppress(OSError):
            text = (self.directory / _LOG).read_text("utf-8", "replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line and "elastic" not in line]
            own = [line for line in errors if not line.startswith("raise")] or lines
            if own:
                return own[-1 if not errors else 0][:_MOST_WORDS]
        return "it printed nothing"


def run_commands(commands: list[Command], seconds: float, *, together: bool) -> None:
    """Run commands, one after the other or side by side.

    Args:
        commands: The commands.
        seconds: The time that each may take.
        together: Whether they run side by side.

    Raises:
        CommandError: One has failed; all others have been ended.
    """
    before = _raise_at_sigterm()
    try:
        for command in commands:
            command.start()
            if not together:
                command.wait(time.monotonic() + seconds)
        until = time.monotonic() + seconds
        for command in commands if together else ():
            command.wait(until)
    finally:
        for command in commands:
            command.end()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _raise_at_sigterm() -> Any:
    """Make SIGTERM an exception, so that trainings are ended; return the handler before."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return signal.signal(signal.SIGTERM, leave)
