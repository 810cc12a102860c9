"""What detectors are given, and what they hand to the diagnosis.

Legend of shapes: S steps, C columns of one type, W workers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.columns import DType, Source, Table
from rankscope.bus.words import count, name_ranks
from rankscope.core.finding import Severity
from rankscope.core.samples import identical_groups
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT, GatheredStep, StepReport
from rankscope.core.thinning import DrawnSamples
from rankscope.core.weighting import log_spread, token_products
from rankscope.evidence import columns_of

_NAMES = {
    dtype: tuple(s.name for s in columns_of(Table.WORKERS, Source.LOCAL) if s.dtype is dtype)
    for dtype in (DType.INT, DType.FLOAT, DType.BOOL)
}
_PLACES = {name: (dtype, at) for dtype, names in _NAMES.items() for at, name in enumerate(names)}


_SUMMARIES: Mapping[str, Callable[[NDArray[Any]], Any]] = {
    "alike": lambda values: (values == values[..., :1]).all(axis=2),
    "some_true": lambda values: values.any(axis=2),
    "all_true": lambda values: values.all(axis=2),
    "some_known": lambda values: (values != MISSING_INT).any(axis=2),
    "all_known": lambda values: (values != MISSING_INT).all(axis=2),
    "smallest": lambda values: values.min(axis=2),
    "largest": lambda values: values.max(axis=2),
}
"""What is asked of the workers' columns, from ``[S, C, W]`` to ``[S, C]``."""

Groups = Sequence[tuple[int, ...]]
"""Groups of ranks whose batches are identical."""


class Stretch:
    """Consecutive steps of as many workers, which are handled together.

    What is asked of the workers' LOCAL columns is computed once for all steps.

    Args:
        reports: The steps, at least one.

    Attributes:
        reports: The same.
        steps: What the workers sent in them.
    """

    def __init__(self, reports: Sequence[StepReport]) -> None:
        self.reports = reports
        self.steps = [report.gathered for report in reports]
        self._values: dict[DType, NDArray[Any]] = {}
        self._summaries: dict[tuple[str, DType], list[list[Any]]] = {}

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the workers table ``[S, W]``.

        Raises:
            KeyError: It has no such LOCAL column.
        """
        dtype, at = _PLACES[name]
        column: NDArray[Any] = self._of_type(dtype)[:, at]
        return column

    def summary(self, what: str, name: str, index: int) -> Any:
        """Return what a step's workers have in a column; ``what`` is one of ``_SUMMARIES``."""
        dtype, at = _PLACES[name]
        if (what, dtype) not in self._summaries:
            self._summaries[what, dtype] = _SUMMARIES[what](self._of_type(dtype)).tolist()
        return self._summaries[what, dtype][index][at]

    def _of_type(self, dtype: DType) -> NDArray[Any]:
        """Return the columns of one type ``[S, C, W]``."""
        if dtype not in self._values:
            names = _NAMES[dtype]
            flat = np.concatenate([step.workers[name] for step in self.steps for name in names])
            self._values[dtype] = flat.reshape(len(self.steps), len(names), -1)
        return self._values[dtype]

    @cached_property
    def samples(self) -> DrawnSamples:
        """What the workers draw."""
        return DrawnSamples([step.samples for step in self.steps])

    @cached_property
    def token_products(self) -> list[list[float]]:
        """How the workers' losses go with their tokens in each step, for :class:`TokenSums`."""
        products_S2 = token_products(self.column("loss"), self.column("loss_weight"))
        return list(products_S2.tolist())

    @cached_property
    def token_spreads(self) -> list[float]:
        """How far the weights of tokens lie apart in each step, see :func:`log_spread`."""
        spreads_S = log_spread(self.column("grad_scale"), self.column("loss_weight"))
        return [float(spread) for spread in spreads_S]


@dataclass(frozen=True)
class Observation:
    """One step as detectors see it.

    Attributes:
        report: The step.
        steps: The steps that are handled together, this one among them; None: it is alone.
        index: Its place among them.
    """

    report: StepReport
    steps: "Stretch | None" = None
    index: int = 0

    @cached_property
    def stretch(self) -> "Stretch":
        """The steps that are handled together."""
        return self.steps or Stretch([self.report])

    @property
    def gathered(self) -> GatheredStep:
        """What the workers sent."""
        return self.report.gathered

    @cached_property
    def identical(self) -> Groups:
        """Groups of workers whose batches hold the same samples."""
        if self.stretch.samples.all_differ(self.index):
            return ()
        return identical_groups(self.gathered.samples)

    def alike(self, name: str) -> bool:
        """Return whether all workers have the same value of a column; NaN is equal to nothing."""
        return bool(self.stretch.summary("alike", name, self.index))

    def some_true(self, name: str) -> bool:
        """Return whether a flag is set on some worker."""
        return bool(self.stretch.summary("some_true", name, self.index))

    def all_true(self, name: str) -> bool:
        """Return whether a flag is set on all workers."""
        return bool(self.stretch.summary("all_true", name, self.index))

    def some_known(self, name: str) -> bool:
        """Return whether some worker has a value of an integer column."""
        return bool(self.stretch.summary("some_known", name, self.index))

    def all_known(self, name: str) -> bool:
        """Return whether all workers have a value of an integer column."""
        return bool(self.stretch.summary("all_known", name, self.index))

    def ends(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value of a float column; NaN if one is missing."""
        smallest, largest = (
            float(self.stretch.summary(end, name, self.index)) for end in ("smallest", "largest")
        )
        return smallest, largest


def observations(reports: Sequence[StepReport]) -> Iterator[Observation]:
    """Yield consecutive steps as detectors see them; those of as many workers go together."""
    for _, group in groupby(reports, lambda report: report.gathered.num_workers):
        together = list(group)
        stretch = Stretch(together)
        for index, report in enumerate(together):
            yield Observation(report, stretch, index)


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
        fields: What the templates of the rules need, besides ``Ranks``, ``ranks``, ``first``,
            ``last``, ``steps`` and ``over``, which follow from the rest.
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
        named, last = name_ranks(self.ranks), f"{self.last_step:,}"
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

    After ``close`` it may be asked for its state, and another of the same build may go on from
    there with the steps of a restarted job.
    """

    @abstractmethod
    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step, in order; return what is new or has changed."""

    def close(self) -> Iterable[Evidence]:
        """End the run; return what had to wait for it."""
        return ()
