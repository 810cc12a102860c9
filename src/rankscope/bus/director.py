"""What one kind of evidence decides at the root, besides finding faults in the record.

Its ``root.py`` has ``make_director(run) -> Director | None``. A director takes what the probes of
its kind send, and returns requests to them. It keeps no socket and no clock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.bus.finding import Finding
from rankscope.bus.step import GatheredStep


class Request(NamedTuple):
    """A request to the probes of one kind, on all workers.

    Attributes:
        step: The step that it is about.
        content: What is asked for, as the probe reads it.
    """

    step: int
    content: bytes


@dataclass(frozen=True, slots=True)
class DirectedRun:
    """The run that directors are made for.

    Attributes:
        num_workers: W.
        first_step: Number of the run's first step.
        run_dir: Its directory.
        options: What was agreed on by all ranks, see ``options`` of ``run.json``.
        by_loop: Whether the training's own loop reduces.
        report: Takes each finding that has changed.
    """

    num_workers: int
    first_step: int
    run_dir: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    by_loop: bool = False
    report: Callable[[Finding], None] = lambda finding: None


class Director:
    """Decides for one kind of evidence.

    Attributes:
        findings: What it has found, by id, each in its latest state.
    """

    findings: Mapping[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """A probe has sent this; ``rank`` is None for a rank of another run."""

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> Iterable[Request]:
        """A step is there, in order; return what to ask of the probes.

        Args:
            step: The step.
            changed: Findings that opened or changed with it.
            known: All findings.
            newest: The newest step that any worker is known to have ended.
        """
        return ()
