"""The diagnosis of a run: feeds steps to the detectors and turns evidence into findings."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from rankscope.core.finding import Finding
from rankscope.core.step import StepReport
from rankscope.diagnose.detectors import DuplicateBatches, NonFinite
from rankscope.diagnose.evidence import Detector, Evidence, Observation
from rankscope.diagnose.overlap import OverlappingShards
from rankscope.diagnose.rules import describe
from rankscope.record import Run


class Diagnosis:
    """Watches a run step by step; equal steps give equal findings, live or from a record.

    Each fault has one finding. It is told when it opens, when its status, cause, ranks, groups or
    severity change, and each time its evidence has doubled.

    Args:
        num_workers: W.
    """

    def __init__(self, num_workers: int) -> None:
        self._detectors: tuple[Detector, ...] = (
            NonFinite(),
            DuplicateBatches(num_workers),
            OverlappingShards(num_workers),
        )
        self._latest: dict[str, Finding] = {}
        self._told: dict[str, tuple[Finding, int]] = {}
        self._step = -1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, each in its latest state, in order of appearance."""
        return tuple(self._latest.values())

    def observe(self, report: StepReport) -> list[Finding]:
        """Take one step, in order.

        Returns:
            The events to record: findings that opened or changed.
        """
        self._step = report.gathered.step
        observation = Observation(report)
        return self._updates(detector.observe(observation) for detector in self._detectors)

    def close(self) -> list[Finding]:
        """End the run.

        Returns:
            The last state of every finding that has changed since it was last told; nothing when
            called again.
        """
        events = self._updates(detector.close() for detector in self._detectors)
        for key, latest in self._latest.items():
            told, count = self._told[key]
            if replace(latest, step=told.step) != told:
                self._told[key] = latest, count
                events.append(latest)
        return events

    def _updates(self, found: Iterable[Iterable[Evidence]]) -> list[Finding]:
        return [
            finding
            for evidence in chain.from_iterable(found)
            if (finding := self._update(evidence)) is not None
        ]

    def _update(self, evidence: Evidence) -> Finding | None:
        """Keep the finding; return it when it is to be told."""
        finding = self._finding(evidence)
        self._latest[finding.id] = finding
        told, count = self._told.get(finding.id, (None, 0))
        same = told is not None and _character(told) == _character(finding)
        if same and evidence.count < 2 * count:
            return None
        self._told[finding.id] = finding, evidence.count
        return finding

    def _finding(self, evidence: Evidence) -> Finding:
        explanation, next_check = describe(evidence.cause, evidence.severity, evidence.fields)
        return Finding(
            id=evidence.key or evidence.cause,
            cause=evidence.cause,
            severity=evidence.severity,
            ranks=evidence.ranks,
            first_step=evidence.first_step,
            last_step=evidence.last_step,
            explanation=explanation,
            next_check=next_check,
            evidence=evidence.numbers,
            groups=evidence.groups,
            status=evidence.status,
            step=self._step,
        )


def _character(finding: Finding) -> tuple[object, ...]:
    """Return what may not change without being told."""
    return finding.status, finding.cause, finding.severity, finding.ranks, finding.groups


def diagnose_run(run: Run) -> tuple[Finding, ...]:
    """Diagnose a recorded run again, from its tables alone.

    Args:
        run: The run.

    Returns:
        The findings that the live run had when it ended.

    Raises:
        RunError: A file of the run cannot be read.
    """
    diagnosis = Diagnosis(run.num_workers)
    for gathered in run.iter_gathered():
        diagnosis.observe(StepReport(gathered, {}))
    diagnosis.close()
    return diagnosis.findings
