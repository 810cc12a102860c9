"""Trackio: a run of its own beside the training's, in the same project.

A row in the training's run would move the training's own step numbers, so none is added there.
"""

import os
from typing import Any

import trackio

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.files import to_plain
from rankscope.sinks.base import NewsSink, RunInfo, StepValues, sentence

DEFAULT_PROJECT = "rankscope"

_LEVELS = {
    Severity.NOTE: trackio.AlertLevel.INFO,
    Severity.WARNING: trackio.AlertLevel.WARN,
    Severity.ERROR: trackio.AlertLevel.ERROR,
}


class TrackioSink(NewsSink):
    """Logs a row per step, and an alert for each finding that opens or gets worse.

    The project is by default that of ``TRACKIO_PROJECT``, else ``rankscope``.
    """

    takes_steps = True

    def __init__(self, project: str | None = None) -> None:
        super().__init__()
        self._project = project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
        self._run: Any = None

    def open(self, run: RunInfo) -> None:
        """Begin a run, named like the run directory."""
        super().open(run)
        described = {"rankscope": dict(run.options), "run_dir": str(run.run_dir), **run.config}
        self._run = trackio.init(
            self._project,
            name=run.run_dir.name,
            config=to_plain(described),
            resume="allow",  # a name that is there already
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def step(self, step: StepValues) -> None:
        """Log a step."""
        self._run.log(step.flat(), step=step.step)

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Send an alert for a finding that opened or got worse."""
        if event is FindingEvent.CLOSED:
            return
        self._run.alert(
            title=f"rankscope: {finding.cause}",
            text=sentence(finding, event),
            level=_LEVELS[finding.severity],
            step=finding.step,
        )

    def close(self) -> None:
        """Send the rest, and end the run."""
        if self._run is not None:
            self._run.finish()
