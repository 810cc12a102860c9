"""Asks the probes to compare the same parameters in several steps where each worker trains alone.

An average of the parameters now and then shows there, as they differ in one step and agree in the
next.
"""

from collections.abc import Sequence

from rankscope.bus.finding import Finding
from rankscope.bus.probe import DirectedRun, Director, Request
from rankscope.bus.step import GatheredStep, trains_alone

_LEAD = 4
"""Steps ahead of the newest, in which all ranks can have the request."""


class AloneDirector(Director):
    """Follows whether each worker trains alone."""

    def __init__(self) -> None:
        self._alone = False

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> Sequence[Request]:
        """Process a step; request other digests once workers train alone."""
        alone = trains_alone(step)
        if alone is None or alone == self._alone:
            return ()
        self._alone = alone
        return [Request(max(step.step, newest) + _LEAD, b"alone" if alone else b"together")]


def make_director(run: DirectedRun) -> AloneDirector | None:
    """Return the director of a run's digests."""
    plan = run.options.get("plan")
    planned = isinstance(plan, dict) and plan.get("local_steps")
    return None if run.num_workers < 2 or planned else AloneDirector()
