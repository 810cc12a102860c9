"""TensorBoard: curves and findings in event files, written without torch or TensorFlow."""

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rankscope.bus.finding import Finding, FindingEvent
from rankscope.sinks.base import NewsSink, RunInfo, StepValues, sentence

FLUSH_SECONDS = 10


class TensorBoardSink(NewsSink):
    """Writes numbers as scalars, and events of findings as text.

    The event file is by default in ``tensorboard`` in the run's directory.
    """

    takes_steps = True

    def __init__(self, log_dir: str | Path | None = None) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None

    def open(self, run: RunInfo) -> None:
        """Create the event file."""
        super().open(run)
        log_dir = self._log_dir or run.run_dir / "tensorboard"
        self._writer = EventFileWriter(str(log_dir), flush_secs=FLUSH_SECONDS)

    def step(self, step: StepValues) -> None:
        """Write a step."""
        values = [Summary.Value(tag=name, simple_value=v) for name, v in step.flat().items()]
        event = Event(wall_time=step.time, step=step.step, summary=Summary(value=values))
        self._writer.add_event(event)

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Write a finding that opened, got worse or closed."""
        text = text_pb("rankscope/findings", sentence(finding, event))
        self._writer.add_event(Event(wall_time=time.time(), step=finding.step, summary=text))

    def close(self) -> None:
        """Write the rest and close the event file."""
        if self._writer is not None:
            self._writer.close()
