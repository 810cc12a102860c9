"""Weights & Biases: beside the training's own curves, or in a run and a process of its own."""

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.files import to_plain
from rankscope.sinks.base import NewsSink, RunInfo, SinkError, StepValues, sentence

_log = logging.getLogger("rankscope")

EXIT_SECONDS = 10.0  # seconds that the training's exit waits for the upload of our own run

_LEVELS = {Severity.NOTE: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}


class WandbSink(NewsSink):
    """Logs to the training's run that is open at its first step, else to a new one.

    In the training's run, numbers are added to the open row, and no row or step is made. A new run
    gets a row per step, and belongs to another process.

    Args:
        project: A project; an open run of another project is then not used. If None, the project
            of the environment.
    """

    takes_steps = True

    def __init__(self, project: str | None = None) -> None:
        super().__init__()
        self._project = project
        self._run: _TheirRun | _OwnRun | None = None
        # Registered before the scope's own exit handler, so called after it.
        atexit.register(_end_at_exit, weakref.ref(self), os.getpid())

    def step(self, step: StepValues) -> None:
        """Log a step."""
        self._attached().log({"rankscope/step": step.step, **step.flat()})

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Send an alert for a finding that opened or got worse, and keep it in the summary."""
        message = {
            "id": finding.id,
            "text": sentence(finding, event),
            "title": f"rankscope: {finding.cause}"[:63],
            "level": None if event is FindingEvent.CLOSED else _LEVELS[finding.severity],
        }
        self._attached().notify(message)

    def close(self) -> None:
        """Finish our own run; the training's run is left open."""
        if self._run is not None:
            self._run.finish()

    def _attached(self) -> "_TheirRun | _OwnRun":
        if self._run is None:
            active = getattr(sys.modules.get("wandb"), "run", None)
            if active is not None and self._project in (None, active.project):
                self._run = _TheirRun(active, self.run)
            else:
                self._run = _OwnRun(self.run, self._project)
                self._run.wait_until_open()
        return self._run


class _TheirRun:
    """The run that the training has open in this process."""

    def __init__(self, run: Any, info: RunInfo) -> None:
        from rankscope.sinks import wandb_process

        self._run: Any = run
        self._take = wandb_process.take
        wandb_process.define_axes(run)
        run.summary["rankscope/run_dir"] = str(info.run_dir)

    def log(self, values: dict[str, float]) -> None:
        self._try(lambda run: run.log(values, commit=False))

    def notify(self, message: dict[str, Any]) -> None:
        self._try(lambda run: self._take(run, message))

    def finish(self) -> None:
        """Leave it open: it is not ours."""

    def _try(self, work: Any) -> None:
        from wandb.errors import UsageError

        if self._run is None:
            return
        try:
            work(self._run)
        except UsageError as error:  # the training has finished its run
            self._run = None
            _log.info("sink wandb: the training's run takes nothing more: %s", error)


class _OwnRun:
    """Our own run, in another process."""

    def __init__(self, info: RunInfo, project: str | None) -> None:
        script = str(Path(__file__).with_name("wandb_process.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the training does not end its upload
            text=True,
            # Without the training's W&B helper process, which would wait for this run at its exit.
            env={key: v for key, v in os.environ.items() if key != "WANDB_SERVICE"},
        )
        described = {**info.options, "run_dir": str(info.run_dir)}
        self._send(
            {
                "project": project,
                "dir": os.environ.get("WANDB_DIR") or str(info.run_dir),
                "name": None if "WANDB_NAME" in os.environ else info.run_dir.name,
                "job_type": "rankscope",
                "config": to_plain({"rankscope": described, **info.config}),
            }
        )

    def wait_until_open(self) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        self._process.stdout.close()
        problem = json.loads(answer)["problem"] if answer else "its process has ended"
        if problem:
            self.finish()
            raise SinkError(f"Weights & Biases cannot start a run: {problem}")

    def log(self, values: dict[str, float]) -> None:
        self._send({"log": values})

    def notify(self, message: dict[str, Any]) -> None:
        self._send(message)

    def finish(self) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(SinkError):  # it has ended already
                # Forked processes hold its input open, so closing it is no end.
                self._send({"end": True})
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def end(self, seconds: float) -> None:
        """Wait so long for the upload, then kill the process and its children."""
        if self._process.returncode is not None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            _log.warning(
                "Weights & Biases has not uploaded all within %g s; wandb sync does that later",
                seconds,
            )
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SinkError(
                "the process that keeps the run of Weights & Biases has ended"
            ) from None


def _end_at_exit(reference: "weakref.ref[WandbSink]", pid: int) -> None:
    sink = reference()
    if sink is not None and os.getpid() == pid and isinstance(sink._run, _OwnRun):
        sink._run.end(EXIT_SECONDS)
