"""Detectors, and the evidence that they return to the diagnosis."""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, name_ranks
from rankscope.stats.state import Stateful


@dataclass(frozen=True, slots=True)
class FaultEvidence:
    """Evidence of one fault, over the whole run so far.

    Attributes:
        cause: Name of the cause.
        severity: Its present severity.
        ranks: The workers concerned.
        first_step: The first step that shows it.
        last_step: The last step that shows it.
        count: Amount of evidence; each doubling makes an event of the finding.
        fields: Fields of the rules' templates, besides ``Ranks``, ``ranks``, ``first``, ``last``,
            ``steps`` and ``over``, which follow from the rest.
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

    def __post_init__(self) -> None:
        named = name_ranks(self.ranks)
        last = f"{self.last_step:,}"
        usual = {
            "Ranks": named.capitalize(),
            "ranks": named,
            "first": f"{self.first_step:,}",
            "last": last,
            "steps": count(self.count, "step"),
            "over": "" if self.status == "open" else f" It was last seen at step {last}.",
        }
        object.__setattr__(self, "fields", {**usual, **self.fields})


class Detector(Stateful, ABC):
    """Watches the stream of steps for one kind of fault.

    The evidence does not depend on how the steps are cut into batches. The state after ``close``
    lets another detector continue with the steps of a restarted job.
    """

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps, one with each iteration; yield each step's new evidence."""
        for step in steps:
            yield list(self.observe_step(step))

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; return new or changed evidence.

        A detector overrides this, or :meth:`observe` where it compares several steps at once.
        """
        raise NotImplementedError

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; return the evidence that had to wait for its end."""
        return ()
