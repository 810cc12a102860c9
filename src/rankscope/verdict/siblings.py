"""The runs of one job: each of its data-parallel groups records one, and they share a verdict."""

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import count, listed, name_ranks
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.verdict.coverage import coverage_of
from rankscope.verdict.rules import first_sentence, ranked


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another run of the same job."""

    path: Path
    ranks: str  # its workers' ranks in the job, in words
    status: str  # see ``rankscope.record.Run.status``
    findings: tuple[Finding, ...]  # its findings, the worst first

    @property
    def worst(self) -> Finding | None:
        """Its worst finding beyond notes."""
        faults = (one for one in self.findings if one.severity > Severity.NOTE)
        return next(faults, None)

    @property
    def sentence(self) -> str:
        """Its worst finding, and the ranks of the job that it compares; empty without one."""
        worst = self.worst
        return "" if worst is None else f"Among {self.ranks} of this job: {first_sentence(worst)}"


def coordinate_of(info: Any) -> str:
    """Return a run's place among those of its job, in words; empty if the job has no other."""
    job = info.get("job")
    return name_ranks(job["ranks"], of_job=True) if job else ""


def siblings_of(run: Run) -> list[Sibling]:
    """Return the other runs of the same attempt of a run's job, in order of their names.

    They lie beside it, and have names with the same beginning and the same number at the end. One
    that cannot be read is left out.
    """
    job = run.info.get("job")
    if not job:
        return []
    found = []
    for path in sorted(run.path.parent.glob(f"{glob.escape(job['base'])}*")):
        if path.name == run.path.name or not Run.is_run(path):
            continue
        try:
            other = Run.open(path)
            theirs = other.info.get("job") or {}
            if theirs.get("id") == job["id"] and _number(other) == _number(run):
                found.append(
                    Sibling(
                        path,
                        coordinate_of(other.info),
                        other.status,
                        tuple(ranked(other.findings())),
                    )
                )
        except RunError:
            continue
    return found


def worst_of(siblings: Iterable[Sibling]) -> Sibling | None:
    """Return the sibling with the worst finding beyond notes."""
    faulty = [one for one in siblings if one.worst is not None]
    return max(faulty, key=lambda one: one.findings[0].severity, default=None)


def describe_siblings(siblings: Iterable[Sibling], info: Mapping[str, Any]) -> str:
    """Return the verdicts of a run's siblings, and its own ranks, in words; empty without any."""
    parts = [f"{one.path.name} ({one.ranks}): {_in_words(one)}" for one in siblings]
    if not parts:
        return ""
    return (
        f"This job has {count(len(parts), 'other run')}: {'; '.join(parts)}. This one's workers, "
        f"which figures and tables number from 0, are {coordinate_of(info)} of the job."
    )


def _in_words(sibling: Sibling) -> str:
    counts = [
        count(sum(one.severity is severity for one in sibling.findings), str(severity))
        for severity in (Severity.ERROR, Severity.WARNING)
        if any(one.severity is severity for one in sibling.findings)
    ]
    return listed(counts) or coverage_of(Run.open(sibling.path)).verdict


def _number(run: Run) -> str:
    """Return what distinguishes the directory of a later attempt."""
    return run.path.name.removeprefix(str(run.info["job"]["name"]))
