"""The checks of a run: those done so far, those that need more steps, and impossible ones.

Each judge declares the number of steps it needs, so that silence is never taken for health.
"""

from collections.abc import Mapping, Sequence

from rankscope.bus.detector import Check, CheckedRun
from rankscope.bus.words import count
from rankscope.evidence import EVIDENCE


def checks_of(
    num_workers: int, options: object, *, samples: bool = True, canaries: bool | None = None
) -> tuple[Check, ...]:
    """Return the checks of a run, see :class:`rankscope.bus.detector.CheckedRun`."""
    if num_workers < 2:
        return ()
    given = options if isinstance(options, Mapping) else {}
    run = CheckedRun(num_workers, given, samples, canaries)
    made = (each.find("judge", "make_checks") for each in EVIDENCE)
    return tuple(check for make in made if make is not None for check in make(run))


def missing_steps(checks: Sequence[Check], num_steps: int) -> int:
    """Return the number of further steps that the slowest check needs."""
    needed = [check.needs for check in checks if not check.impossible]
    return max(0, max(needed, default=0) - num_steps)


def describe_checks(checks: Sequence[Check], num_steps: int) -> tuple[str, ...]:
    """List the checks done, those to come, and impossible ones, in one sentence each."""
    possible = [check for check in checks if not check.impossible]
    done = [check.what for check in possible if check.needs <= num_steps and not check.pending]
    waiting = [
        f"{check.what} ({check.pending or count(check.needs - num_steps, 'more step')})"
        for check in possible
        if check.needs > num_steps or check.pending
    ]
    never = [f"{check.what} ({check.impossible})" for check in checks if check.impossible]
    parts = (
        ("Checked so far: ", done) if waiting else ("", []),
        ("Not yet checked: ", waiting),
        ("This run cannot show: ", never),
    )
    return tuple(f"{label}{'; '.join(items)}." for label, items in parts if items)
