"""What a run of the bench shows as a whole: shares per class against the goals, and a page."""

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

import rankscope
from rankscope.faults.bench import Score
from rankscope.faults.catalogue import Fault, FaultClass

WITHIN = 150
"""Steps within which a statistical fault is to be detected."""
SMALL = 1.5
"""Shifts of fewer standard deviations are listed apart."""

_HEADINGS = {
    FaultClass.EXACT: "Exact faults",
    FaultClass.STATISTICAL: "Statistical faults",
    FaultClass.PLAN: "Faults against the plan",
    FaultClass.TWO_RUNS: "What only two runs can show",
    FaultClass.NONE: "Faults without evidence inside the run",
    FaultClass.HEALTHY: "Healthy look-alikes",
}

_TERMS = (
    "*Detected*: a finding of a warning or more (of a note, where the catalogue says so) opened "
    "after the fault had begun. *Worker*, *first* and *first two*: the workers and the cause by "
    "the findings that are ranked first, over all runs, detected or not. Of a fault that hits all "
    "workers alike, a finding names all of them or none. *Steps*: from the fault's first step to "
    "the finding, the median over runs."
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


def shares(scores: Sequence[Score]) -> list[Share]:
    """Return the shares that the bench is judged by."""
    exact = _of(scores, FaultClass.EXACT)
    statistical = [s for s in _of(scores, FaultClass.STATISTICAL) if not is_small(s)]
    small = [s for s in _of(scores, FaultClass.STATISTICAL) if is_small(s)]
    healthy = _of(scores, FaultClass.HEALTHY)
    plan = _of(scores, FaultClass.PLAN)
    return [
        _share("Exact faults: detected", exact, lambda s: s.detected, 0.99),
        _share("Exact faults: worker named", exact, lambda s: s.rank_named, 0.95),
        _share("Exact faults: cause named first", exact, _first, 0.95),
        _share("Exact faults: cause named first or second", exact, _second, None),
        _share(f"Statistical faults: detected within {WITHIN} steps", statistical, _in_time, 0.95),
        _share("Statistical faults: worker named", statistical, lambda s: s.rank_named, 0.98),
        _share("Statistical faults: cause named first", statistical, _first, 0.85),
        _share("Statistical faults: cause named first or second", statistical, _second, None),
        _share(f"Shifts below {SMALL} standard deviations: detected", small, _in_time, None),
        _share("Faults against the plan: detected", plan, lambda s: s.detected, None),
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
    classes = [kind for kind in _HEADINGS if any(fault.fault_class is kind for fault in faults)]
    part = _HEADINGS[classes[0]].lower() if len(classes) == 1 else "a selection"
    chosen = "Every fault and every healthy look-alike" if whole else "Each of these entries"
    workers = sorted({score.num_workers for score in scores})
    seeds = sorted({score.seed for score in scores})
    missed = num_planned - len(scores)
    cut = f" **Interrupted: {missed:,} of {num_planned:,} runs are still to be made.**"
    parts = [
        "# The fault bench" + ("" if whole else f": {part}"),
        f"Written by `{command}`, never by hand. {chosen} of the "
        "catalogue (`src/rankscope/faults/catalogue.toml`, expectations written before the first "
        "run) is injected into a real training job on real gloo ranks, which meets rankscope "
        "through `rankscope.watch` only.",
        f"Workers: {_listed(workers)}. Seeds: {_listed(seeds)}. rankscope {rankscope.__version__}, "
        f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}."
        + (cut if missed else ""),
        "## Against the goals",
        _table(
            ("what", "runs", "share", "goal", ""),
            [_share_row(share) for share in shares(scores) if share.total],
        ),
    ]
    if classes != [FaultClass.HEALTHY]:
        parts.append(_TERMS)
    for kind in classes:
        of_class = [fault for fault in faults if fault.fault_class is kind]
        parts += [f"## {_HEADINGS[kind]}", _class_table(of_class, scores)]
    missing = [f"- {fault.id}: {fault.missing}" for fault in faults if fault.missing]
    if missing:
        parts += ["## Not reproduced", "\n".join(missing)]
    lines = [f"- {fault.id}: {fault.evidence}" for fault in faults if fault.evidence]
    if lines:
        parts += ["## What the evidence needs, and where it ends", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _class_table(faults: Sequence[Fault], scores: Sequence[Score]) -> str:
    by_fault = {f.id: [s for s in scores if s.fault.id == f.id] for f in faults}
    if faults[0].healthy:
        rows = [_healthy_row(fault, by_fault[fault.id]) for fault in faults]
        return _table(("id", "what", "runs", "alarms", "notes"), rows)
    shifted = faults[0].fault_class is FaultClass.STATISTICAL
    head = ["id", "what", "runs", "detected", "steps", "worker", "first", "first two", "found"]
    rows = []
    for fault in faults:
        rows.append(_fault_row(fault, by_fault[fault.id]))
        if shifted:
            rows[-1].append(_median([s.shift for s in by_fault[fault.id]], "{:.1f}"))
    return _table([*head, "shift, sd"] if shifted else head, rows)


def _fault_row(fault: Fault, scores: Sequence[Score]) -> list[str]:
    name = [fault.id, fault.mechanism]
    if not scores:
        return [*name, "0", *["–"] * 6]
    counted: list[Callable[[Score], bool]] = [lambda s: s.rank_named, _first, _second]
    return [
        *name,
        str(len(scores)),
        _percent(sum(s.detected for s in scores), len(scores)),
        _median([s.delay for s in scores], "{:.0f}"),
        *(_percent(sum(map(counts, scores)), len(scores)) for counts in counted),
        _causes(scores, first=True),
    ]


def _healthy_row(fault: Fault, scores: Sequence[Score]) -> list[str]:
    alarms = sorted({cause for score in scores for cause in score.false_alarms})
    return [
        fault.id,
        fault.mechanism,
        f"{len(scores)} × {scores[0].num_steps:,} steps" if scores else "0",
        ", ".join(f"`{cause}`" for cause in alarms) or "none",
        _causes(scores, first=False),
    ]


def _causes(scores: Sequence[Score], *, first: bool) -> str:
    """Name the causes that were found, and in how many runs if not in all."""
    found: dict[str, int] = {}
    for score in scores:
        shown = score.findings[:1] if first else score.findings
        for name in {f"`{finding.cause}` ({finding.severity})" for finding in shown}:
            found[name] = found.get(name, 0) + 1
    texts = [n if k == len(scores) else f"{n} in {k}" for n, k in sorted(found.items())]
    problems = {score.problem for score in scores if score.problem}
    return ", ".join([*texts, *sorted(problem.replace("|", "/") for problem in problems)]) or "–"


def _share_row(share: Share) -> list[str]:
    goal = "" if share.goal is None else f"≥ {share.goal:.0%}" if share.goal < 1 else "all"
    verdict = "" if share.goal is None else "reached" if share.reached else "**missed**"
    return [share.what, str(share.total), _percent(share.good, share.total), goal, verdict]


def _share(
    what: str, scores: Sequence[Score], holds: Callable[[Score], bool], goal: float | None
) -> Share:
    return Share(what, sum(map(holds, scores)), len(scores), goal)


def _of(scores: Sequence[Score], fault_class: FaultClass) -> list[Score]:
    return [s for s in scores if s.fault.fault_class is fault_class and s.fault.expects_or_healthy]


def _first(score: Score) -> bool:
    return score.cause_rank == 1


def _second(score: Score) -> bool:
    return score.cause_rank in (1, 2)


def _in_time(score: Score) -> bool:
    return score.delay is not None and score.delay <= WITHIN


def _percent(good: int, total: int) -> str:
    return f"{good / total:.1%}".replace(".0%", "%") if total else "–"


def _median(values: Iterable[float | None], shape: str) -> str:
    known = [value for value in values if value is not None]
    return shape.format(median(known)) if known else "–"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
