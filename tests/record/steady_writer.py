"""A process that writes a run step by step, and says after each flush how far it is.

Run as ``python steady_writer.py PATH PART_BYTES``; it goes on until it is killed.
"""

import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope.bus.finding import Finding, Severity
from rankscope.record import RunWriter, writer
from record.step_reports import make_report


def make_finding(step: int) -> Finding:
    return Finding(
        id="steady",
        cause="data.duplicate_batches",
        severity=Severity.WARNING,
        ranks=(0, 2),
        first_step=0,
        last_step=step,
        explanation="Two workers read the same batches.",
        next_check="Compare their samplers.",
    )


def main(path: str, part_bytes: int) -> None:
    writer.PART_BYTES = part_bytes
    run = RunWriter(path, {"num_workers": 4})
    for step in count():
        run.add(make_report(step, micro=2))
        run.add_findings([make_finding(step)])
        run.flush()
        print(step + 1, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
