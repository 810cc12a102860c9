"""The detector of canaries."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.bus.governor import LAG
from rankscope.evidence.canary.verdicts import CanaryVerdicts

CANARY_STEPS = 3 * LAG
"""Steps until the first canary is judged."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (CanaryVerdicts(run.num_workers, run.flagged.steadily),)


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.options.get("canary", True) else "canaries are off"
    what = "a worker that computes other results from the same batch"
    pending = "no canary has run yet" if run.canaries is False and not impossible else ""
    return (Check(what, CANARY_STEPS, impossible, pending),)
