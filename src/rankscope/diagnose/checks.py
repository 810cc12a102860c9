"""What a run has been checked for so far, what needs more steps, and what it cannot show.

How many steps a check needs comes from its detector, so that silence is never taken for health.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rankscope.core.budget import OUTLIERS, alarm_level
from rankscope.core.governor import LAG
from rankscope.core.step import MAX_PAIRED_WORKERS
from rankscope.diagnose import reduction, stragglers, weighting
from rankscope.diagnose.outlier_parts import Part, total_signals
from rankscope.diagnose.rules import count

CANARY_STEPS = 3 * LAG
"""Steps in which the first canary is planned, has run and is judged."""

MOST_STEPS = 64
"""Steps that are tried at most to see how many the search for outliers needs."""

STATE_STEPS = 64
"""Steps in which the digests have gone through all parameters, buffers and optimizer state."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run is checked for.

    Attributes:
        what: What it would find, in words.
        needs: Steps after which its silence means something.
        impossible: Why this run cannot show it; empty if it can.
    """

    what: str
    needs: int
    impossible: str = ""


@cache
def fewest_steps(num_workers: int) -> int:
    """Return how many steps the search for outliers needs at least: for a worker far from all.

    The detector itself says so: it is fed with one worker that is farthest out in every signal.
    Small differences take longer.
    """
    if num_workers < 2:
        return 0
    num_workers = min(num_workers, MAX_PAIRED_WORKERS)
    part = Part(num_workers, total_signals())
    noise = np.random.default_rng(0)
    sizes_W = np.zeros(num_workers)
    level = alarm_level(OUTLIERS / 2)
    for step in range(MOST_STEPS):
        values_SW = 1 + 0.05 * noise.standard_normal((len(part.signals), num_workers))
        values_SW[:, 0] = 3.0
        next(part.observe(values_SW[None], sizes_W[None], [step]))
        if part.test.evidence >= level:
            return step + 1
    return MOST_STEPS


def checks_of(num_workers: int, options: object, *, samples: bool = True) -> tuple[Check, ...]:
    """Return what a run is checked for.

    Args:
        num_workers: W.
        options: What ``run.json`` says of the options of ``watch``.
        samples: Whether its samples were identified.
    """
    if num_workers < 2:
        return ()
    options = options if isinstance(options, Mapping) else {}
    tier = str(options.get("tier", "sketch"))
    no_evidence = "" if options.get("evidence", True) else "evidence=False"
    no_audit = "" if options.get("reduced", "sketch") == "sketch" else "no sketch of the reduction"
    return (
        Check("values that are not finite", 1),
        Check("shared batches", 3, "" if samples else "samples were not identified"),
        Check("the weights of workers in the average", weighting.LEAST_STEPS),
        Check("faults of the reduction", reduction.STEPS, no_audit or _without(tier)),
        Check("a worker that differs from the others", fewest_steps(num_workers)),
        Check(
            "a worker that computes other results from the same batch",
            CANARY_STEPS,
            "" if options.get("canary", True) else "canaries are off",
        ),
        Check("slow workers", stragglers.WARM_UP + stragglers.WINDOW),
        Check("parameters, buffers and optimizer state", STATE_STEPS, no_evidence),
    )


def _without(tier: str) -> str:
    return "tier='scalars'" if tier == "scalars" else ""


def missing_steps(checks: Sequence[Check], num_steps: int) -> int:
    """Return how many more steps the slowest check needs; 0 if none does."""
    needed = [check.needs for check in checks if not check.impossible]
    return max(0, max(needed, default=0) - num_steps)


def say_checks(checks: Sequence[Check], num_steps: int) -> tuple[str, ...]:
    """Return what was checked, what was not yet, and what cannot be, one sentence each."""
    possible = [check for check in checks if not check.impossible]
    done = [check.what for check in possible if check.needs <= num_steps]
    waiting = [
        f"{check.what} ({count(check.needs - num_steps, 'more step')})"
        for check in possible
        if check.needs > num_steps
    ]
    never = [f"{check.what} ({check.impossible})" for check in checks if check.impossible]
    parts = (
        ("Checked so far: ", done) if waiting else ("", []),
        ("Not yet checked: ", waiting),
        ("This run cannot show: ", never),
    )
    return tuple(f"{label}{'; '.join(items)}." for label, items in parts if items)
