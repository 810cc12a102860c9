"""What is known of a step under DDP: of itself, and how often its hooks were called."""

from collections import Counter
from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepState:
    """What is known of the step that runs; there is a new one for each.

    Attributes:
        begun: A backward pass that is due has begun.
        carried_over: See :class:`~rankscope.capture.taps.tap.LocalGradient`.
        through_ddp: A forward pass went through DDP.
        synchronises: The last forward pass is one whose backward pass reduces.
        settled: The reduction is over.
        reduced_known: The reduced gradient was read.
        reduced_product: Its inner product with the local one.
        spoiled: What was measured is not the step's local gradient.
    """

    begun: bool = False
    carried_over: Tensor | None = None
    through_ddp: bool = False
    synchronises: bool = False
    settled: bool = False
    reduced_known: bool = False
    reduced_product: Tensor | None = None
    spoiled: bool = False


class HookCalls:
    """Which parameters' hooks are called in the backward passes of a step, and how often.

    Reentrant checkpointing of a shared parameter calls its hook once per use, and the last call
    sees the whole gradient. How many there are is learnt from a pass that is not measured.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # where it is not 1
        self._counts: Counter[str] = Counter()  # in this pass
        self._before: set[str] = set()  # in earlier passes of the step

    @property
    def names(self) -> KeysView[str]:
        """The parameters whose hooks were called in the last pass."""
        return self._counts.keys()

    @property
    def whole(self) -> bool:
        """Whether the last pass saw every parameter that the step's earlier passes saw.

        A parameter that only earlier micro-batches used was not read in the last one.
        """
        return self._before <= self._counts.keys()

    def reset(self) -> None:
        """Begin a step."""
        self._counts.clear()
        self._before.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._before |= self._counts.keys()
        self._counts.clear()

    def last_of(self, name: str) -> bool:
        """Take a call; return whether it is the one that sees the whole gradient."""
        self._counts[name] += 1
        return self._counts[name] == self._expected.get(name, 1)

    def add(self, names: Iterable[str]) -> None:
        """Take many calls."""
        self._counts.update(names)

    def end_pass(self, late: Collection[str] = ()) -> bool:
        """End a backward pass; return whether a parameter was not called as often as expected.

        Args:
            late: Parameters for which it does not matter, since they were not read in their hooks.
        """
        several = {name: count for name, count in self._counts.items() if count > 1}
        absent = {n: count for n, count in self._expected.items() if n not in self._counts}
        expected, self._expected = self._expected, absent | several
        if expected == self._expected:
            return False
        differ = expected.items() ^ self._expected.items()
        return any(name not in late for name, _ in differ)
