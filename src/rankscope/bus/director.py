"""Decisions at the root of one kind of evidence, besides finding faults in the record.

Its ``root.py`` has ``make_director(run) -> Director | None``. A director receives the messages of
its probes, and returns requests to them. It has no socket and no clock.
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
        step: The step concerned.
        content: Bytes for the probe to read.
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
        options: Options that all ranks agreed on, see ``options`` of ``run.json``.
        by_loop: Whether the training's own loop reduces.
        report: Called with each finding that has changed.
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
        findings: Its findings by id, each in its latest state.
    """

    findings: Mapping[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a probe's message; ``rank`` is None for a rank of another run."""

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> Iterable[Request]:
        """Process the next step; return requests to the probes.

        Args:
            step: The step.
            changed: Findings that opened or changed with it.
            known: All findings.
            newest: The newest step that any worker is known to have ended.
        """
        return ()
