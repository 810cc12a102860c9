"""JSON lines: one file that any tool can read or follow."""

import json
from pathlib import Path
from typing import TextIO

from rankscope.bus.finding import Finding
from rankscope.sinks.base import RunInfo, StepValues, plain_finding


class JsonLinesSink:
    """Writes one line per step and per event of a finding.

    A step is ``{"step": 3, "time": …, "rankscope/loss_std": …, …}``, a finding
    ``{"finding": {…}}`` as in ``findings.jsonl``. Lines are appended. The file is by default
    ``metrics.jsonl`` in the run's directory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._file: TextIO | None = None

    def open(self, run: RunInfo) -> None:
        """Open the file."""
        path = self._path or run.run_dir / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, step: StepValues) -> None:
        """Write a step."""
        self._write({"step": step.step, "time": step.time, **step.flat()})

    def finding(self, finding: Finding) -> None:
        """Write a finding."""
        self._write({"finding": plain_finding(finding)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None, "open comes first"
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
