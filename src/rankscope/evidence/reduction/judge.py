"""The detectors of reductions: their norms, their sketches, and accumulation before them."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.evidence.reduction import checks as reduction
from rankscope.evidence.reduction.accumulation import AccumulationAudit, ChangedLater
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.evidence.reduction.checks import ReductionChecks


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        ReductionChecks(run.num_workers),
        ReductionAudit(run.num_workers, run.reduced_in, hook=run.comm_hook, by_loop=run.by_loop),
        AccumulationAudit(),
        ChangedLater(other_axes=run.world_size > run.num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = ""
    if run.options.get("tier") == "scalars":
        impossible = "tier='scalars'"
    if run.options.get("reduced", "sketch") != "sketch":
        impossible = "no sketch of the reduction"
    return (Check("faults of the reduction", reduction.STEPS, impossible),)
