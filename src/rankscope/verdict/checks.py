"""What a run has been checked for so far, what needs more steps, and what it cannot show.

How many steps a check needs comes from its judge, so that silence is never taken for health.
"""

from collections.abc import Mapping, Sequence

from rankscope.bus.checks import Check, CheckedRun
from rankscope.bus.words import count
from rankscope.evidence import EVIDENCE


def checks_of(num_workers: int, options: object, *, samples: bool = True) -> tuple[Check, ...]:
    """Return what a run is checked for.

    Args:
        num_workers: W.
        options: What ``run.json`` says of the options of ``watch``.
        samples: Whether its samples were identified.
    """
    if num_workers < 2:
        return ()
    run = CheckedRun(num_workers, options if isinstance(options, Mapping) else {}, samples)
    made = (each.find("judge", "make_checks") for each in EVIDENCE)
    return tuple(check for make in made if make is not None for check in make(run))


def missing_steps(checks: Sequence[Check], num_steps: int) -> int:
    """Return how many more steps the slowest check needs; 0 if none does."""
    needed = [check.needs for check in checks if not check.impossible]
    return max(0, max(needed, default=0) - num_steps)


def describe_checks(checks: Sequence[Check], num_steps: int) -> tuple[str, ...]:
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
