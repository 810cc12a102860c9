"""What detectors are given, and what they hand to the diagnosis."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from rankscope.core.finding import Severity
from rankscope.core.samples import identical_groups
from rankscope.core.state import State
from rankscope.core.step import GatheredStep, StepReport
from rankscope.core.weighting import token_products

Groups = Sequence[tuple[int, ...]]
"""Groups of ranks whose batches are identical."""


@dataclass(frozen=True)
class Observation:
    """One step as detectors see it.

    Attributes:
        report: The step.
    """

    report: StepReport

    @property
    def gathered(self) -> GatheredStep:
        """What the workers sent."""
        return self.report.gathered

    @cached_property
    def identical(self) -> Groups:
        """Groups of workers whose batches hold the same samples."""
        return identical_groups(self.gathered.samples)

    @cached_property
    def token_products(self) -> tuple[float, float]:
        """How the workers' losses go with their tokens, for :class:`TokenSums`."""
        workers = self.gathered.workers
        return token_products(workers["loss"][None], workers["loss_weight"][None])


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a detector knows about one fault, over the whole run so far.

    Attributes:
        cause: Name of the cause.
        severity: How bad it is now.
        ranks: The workers concerned.
        first_step: The first step that shows it.
        last_step: The last step that shows it.
        count: How much of it there is; a finding is told again when this has doubled.
        fields: What the templates of the rules need.
        numbers: Evidence for the record.
        key: Names the fault inside the run, and so its finding; the cause, if empty.
        groups: The parameter groups concerned; empty when none in particular.
        status: ``open``, or ``closed`` once the fault has healed.
    """

    cause: str
    severity: Severity
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    count: int
    fields: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    groups: tuple[str, ...] = ()
    status: str = "open"


class Detector(Protocol):
    """Watches the stream of steps for one kind of fault.

    After ``close`` it may be asked for its state, and another of the same build may go on from
    there with the steps of a restarted job. :class:`rankscope.core.state.Stateful` gives both
    ``state`` and ``restore`` to a class.
    """

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step, in order; return what is new or has changed."""

    def close(self) -> Iterable[Evidence]:
        """End the run; return what had to wait for it."""

    def state(self) -> State:
        """Return a copy of all that it remembers."""

    def restore(self, state: State) -> None:
        """Remember what a detector of the same build remembered.

        Raises:
            StateError: The state does not fit.
        """
