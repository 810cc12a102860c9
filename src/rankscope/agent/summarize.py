"""Computes the recorded step from the workers' values."""

from typing import Any

from rankscope.bus.evidence import Source, Table
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.evidence import EVIDENCE, columns_of

_STEPS = tuple(column.name for column in columns_of(Table.STEPS, Source.DERIVED))
_WORKERS = {column.name for column in columns_of(Table.WORKERS, Source.DERIVED)}
_DERIVE = [derive for each in EVIDENCE if (derive := each.find("combine", "derive")) is not None]


def summarize(gathered: GatheredStep) -> StepReport:
    """Compute every DERIVED column of a step.

    Means and spreads leave out missing and non-finite values. Equal inputs give equal reports.
    """
    steps: dict[str, float] = {"interval": float(gathered.interval)}
    workers: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for derive in _DERIVE:
        derived = derive(gathered)
        steps.update(derived.steps)
        workers.update(derived.workers)
        report.update(derived.report)
    assert steps.keys() == set(_STEPS), "the steps table has other derived columns"
    assert workers.keys() == _WORKERS, "the workers table has other derived columns"
    values = {name: steps[name] for name in _STEPS}
    return StepReport(gathered, values, workers, **report)
