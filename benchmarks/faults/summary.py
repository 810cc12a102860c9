"""What a run of the bench shows as a whole: shares per class against the goals, and a page."""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

import rankscope
from rankscope import Severity

from .bench import Score
from .catalogue import Fault, FaultClass

WITHIN = 150
"""Steps within which a statistical fault is to be detected."""
SMALL = 1.5
"""Shifts of fewer standard deviations are listed apart."""

_HEADINGS = {
    FaultClass.EXACT: "Exact faults",
    FaultClass.STATISTICAL: "Statistical faults",
    FaultClass.PLAN: "Faults against the plan",
    FaultClass.TWO_RUNS: "Faults without evidence inside the run",
    FaultClass.NONE: "Faults without evidence inside the run",
    FaultClass.HEALTHY: "Healthy look-alikes",
}

_Row = dict[str, str]
_COUNTED: dict[str, Callable[[Score], bool]] = {
    "detected": lambda score: score.detected,
    "worker": lambda score: score.rank_named,
    "cause": lambda score: score.cause_rank == 1,
}
_TERMS = (
    "*Detected*: a finding of a warning or more (of a note, where the catalogue says so) opened "
    "after the fault had begun. *Worker* and *cause*: the finding that is ranked first names them "
    "(all workers or none, if all are hit alike). *Steps*: from the fault's first step to the "
    "finding, the median over runs. *Found*: the finding that is ranked first, an error unless "
    "stated."
)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of runs and what it is meant to be.

    Attributes:
        what: What is counted.
        good: Runs in which it holds.
        total: All runs.
        goal: Least share, in [0, 1]; None where there is none.
    """

    what: str
    good: int
    total: int
    goal: float | None

    @property
    def reached(self) -> bool:
        """Whether the goal is reached; true where there is none, or nothing was run."""
        return self.goal is None or not self.total or self.good / self.total >= self.goal

    @property
    def percent(self) -> str:
        """The share in words; empty where nothing was run."""
        return f"{self.good / self.total:.1%}".replace(".0%", "%") if self.total else ""


def shares(scores: Sequence[Score]) -> list[Share]:
    """Return the shares that the bench is judged by."""
    exact = _of(scores, FaultClass.EXACT)
    statistical = [s for s in _of(scores, FaultClass.STATISTICAL) if not is_small(s)]
    small = [s for s in _of(scores, FaultClass.STATISTICAL) if is_small(s)]
    healthy = _of(scores, FaultClass.HEALTHY)
    plan = _of(scores, FaultClass.PLAN)
    return [
        _share("Exact faults: detected", exact, _COUNTED["detected"], 0.99),
        _share("Exact faults: worker named", exact, _COUNTED["worker"], 0.95),
        _share("Exact faults: cause named first", exact, _COUNTED["cause"], 0.95),
        _share(f"Statistical faults: detected within {WITHIN} steps", statistical, _in_time, 0.95),
        _share("Statistical faults: worker named", statistical, _COUNTED["worker"], 0.98),
        _share("Statistical faults: cause named first", statistical, _COUNTED["cause"], 0.85),
        _share(f"Shifts below {SMALL} standard deviations: detected", small, _in_time, None),
        _share("Faults against the plan: detected", plan, _COUNTED["detected"], None),
        _share("Healthy look-alikes: notes only", healthy, lambda s: not s.false_alarms, 1.0),
        _share("All runs: no alarm before the fault", scores, lambda s: not s.false_alarms, 1.0),
        _share(
            "All runs: ended, and were watched to the end", scores, lambda s: not s.problem, 1.0
        ),
    ]


def is_small(score: Score) -> bool:
    """Return whether a statistical fault's lasting shift is below the goals' limit."""
    return score.shift is not None and score.shift < SMALL


def markdown(
    scores: Sequence[Score],
    faults: Sequence[Fault],
    command: str,
    num_planned: int,
    *,
    whole: bool = True,
) -> str:
    """Return the page on a run of the bench.

    Args:
        scores: One per run.
        faults: What was chosen of the catalogue, what is not reproduced included.
        command: What was run.
        num_planned: Runs that the command asked for; more than scores if it was interrupted.
        whole: Whether the whole catalogue was chosen.
    """
    sections = {
        heading: [fault for fault in faults if _HEADINGS[fault.fault_class] == heading]
        for heading in _HEADINGS.values()
    }
    headings = [heading for heading, faults_of_it in sections.items() if faults_of_it]
    part = headings[0].lower() if len(headings) == 1 else "a selection"
    chosen = "Every fault and every healthy look-alike" if whole else "Each of these entries"
    workers = sorted({score.num_workers for score in scores})
    seeds = sorted({score.seed for score in scores})
    missed = num_planned - len(scores)
    cut = f" **Interrupted: {missed:,} of {num_planned:,} runs are still to be made.**"
    parts = [
        "# The fault bench" + ("" if whole else f": {part}"),
        f"Written by `{command}`. {chosen} of the "
        "catalogue (`benchmarks/faults/catalogue.toml`, expectations written before the first "
        "run) is injected into a real training job on gloo ranks that `rankscope.watch` watches.",
        f"Workers: {_listed(workers)}. Seeds: {_listed(seeds)}. rankscope {rankscope.__version__}, "
        f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}."
        + (cut if missed else ""),
        "## Against the goals",
        _table([_share_row(share) for share in shares(scores) if share.total], 1),
    ]
    if not all(fault.healthy for fault in faults):
        parts.append(_TERMS)
    for heading in headings:
        rows = [
            _row(fault, [score for score in scores if score.fault.id == fault.id])
            for fault in sections[heading]
        ]
        parts += [f"## {heading}", _table(rows, 2)]
    missing = [f"- {fault.id}: {fault.missing}" for fault in faults if fault.missing]
    if missing:
        parts += ["## Not reproduced", "\n".join(missing)]
    lines = [f"- {fault.id}: {fault.evidence}" for fault in faults if fault.evidence]
    if lines:
        parts += ["## Remarks", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _row(fault: Fault, scores: Sequence[Score]) -> _Row:
    """Return a fault's row: what is told of its class."""
    row = {"id": fault.id, "what": fault.mechanism, "runs": str(len(scores))}
    row["problems"] = _named(scores, lambda s: {s.problem.replace("|", "/")} - {""})
    if fault.healthy:
        row["steps"] = _listed(sorted({score.num_steps for score in scores}))
        row["alarms"] = _named(scores, lambda s: {f"`{cause}`" for cause in s.false_alarms})
        row["notes"] = _named(scores, _notes)
        return row
    if fault.expects_finding:
        row |= {head: _share(head, scores, holds, None).percent for head, holds in _COUNTED.items()}
        row["steps"] = _median([score.delay for score in scores], "{:.0f}")
    row["found"] = _named(scores, _most_probable)
    if fault.fault_class is FaultClass.STATISTICAL:
        row["shift, sd"] = _median([score.shift for score in scores], "{:.1f}")
    return row


def _most_probable(score: Score) -> set[str]:
    severity = {one: "" if one is Severity.ERROR else f" ({one})" for one in Severity}
    return {f"`{finding.cause}`{severity[finding.severity]}" for finding in score.findings[:1]}


def _notes(score: Score) -> set[str]:
    return {f"`{one.cause}`" for one in score.findings if one.severity is Severity.NOTE}


def _named(scores: Sequence[Score], names: Callable[[Score], set[str]]) -> str:
    """Return what scores name, and in how many runs if not in all."""
    found = Counter(name for score in scores for name in names(score))
    return ", ".join(n if k == len(scores) else f"{n} in {k}" for n, k in sorted(found.items()))


def _share_row(share: Share) -> _Row:
    goal = "" if share.goal is None else f"≥ {share.goal:.0%}" if share.goal < 1 else "all"
    missed = "" if share.reached else ", **missed**"
    counted = {"runs": str(share.total), "share": share.percent}
    return {"what": share.what, **counted, "goal": goal + missed}


def _share(
    what: str, scores: Sequence[Score], holds: Callable[[Score], bool], goal: float | None
) -> Share:
    return Share(what, sum(map(holds, scores)), len(scores), goal)


def _of(scores: Sequence[Score], fault_class: FaultClass) -> list[Score]:
    return [s for s in scores if s.fault.fault_class is fault_class and s.fault.expects_or_healthy]


def _in_time(score: Score) -> bool:
    return score.delay is not None and score.delay <= WITHIN


def _median(values: Iterable[float | None], shape: str) -> str:
    known = [value for value in values if value is not None]
    return shape.format(median(known)) if known else ""


def _listed(values: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def _table(rows: Sequence[_Row], names: int) -> str:
    """Return a table, after a sentence on the columns that are alike in all its rows.

    Args:
        rows: Cells by the column's head.
        names: How many columns at the beginning name the row, and stay.
    """
    if not rows:
        return "Nothing was run."
    cells = {head: [row[head] for row in rows] for head in rows[0]}
    alike = [head for head in [*cells][names:] if len(rows) > 1 and len({*cells[head]}) == 1]
    said = [f"{head}: {cells[head][0] or 'none'}" for head in alike]
    heads = [head for head in cells if head not in alike]
    lines = [heads, ["---"] * len(heads), *([row[head] or "–" for head in heads] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"In every row, {', '.join(said)}.\n\n{table}" if said else table
