"""What detectors are given, and what they hand to the diagnosis.

Legend of shapes: S steps, C columns of one type, W workers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.finding import Severity
from rankscope.core.samples import identical_groups
from rankscope.core.signals import DType, Source, Table, signals
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT, GatheredStep, StepReport
from rankscope.core.thinning import DrawnSamples
from rankscope.core.weighting import log_spread, token_products_of_steps
from rankscope.diagnose.rules import count, name_ranks

_NAMES = {
    dtype: tuple(s.name for s in signals(Table.WORKERS, Source.LOCAL) if s.dtype is dtype)
    for dtype in (DType.INT, DType.FLOAT, DType.BOOL)
}
_PLACES = {name: (dtype, at) for dtype, names in _NAMES.items() for at, name in enumerate(names)}


class Columns:
    """The LOCAL columns of the workers table in consecutive steps of as many workers.

    Args:
        steps: The steps, at least one.
    """

    def __init__(self, steps: Sequence[GatheredStep]) -> None:
        self._steps = steps
        self._values: dict[DType, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column ``[S, W]``.

        Raises:
            KeyError: There is no such column.
        """
        dtype, at = _PLACES[name]
        column: NDArray[Any] = self._of_type(dtype)[:, at]
        return column

    def alike(self, name: str, index: int) -> bool:
        """Return whether all workers have the same value in a step; NaN is equal to nothing."""
        dtype, at = _PLACES[name]
        return self._alike[dtype][index][at]

    def some_true(self, name: str, index: int) -> bool:
        """Return whether a flag is set on some worker in a step."""
        return self._some_true[index][_PLACES[name][1]]

    def all_true(self, name: str, index: int) -> bool:
        """Return whether a flag is set on all workers in a step."""
        return self._all_true[index][_PLACES[name][1]]

    def some_known(self, name: str, index: int) -> bool:
        """Return whether some worker has a value of an integer column in a step."""
        return self._some_known[index][_PLACES[name][1]]

    def all_known(self, name: str, index: int) -> bool:
        """Return whether all workers have a value of an integer column in a step."""
        return self._all_known[index][_PLACES[name][1]]

    def ends(self, name: str, index: int) -> tuple[float, float]:
        """Return the smallest and the largest value of a float column; NaN if one is missing."""
        at = _PLACES[name][1]
        return self._smallest[index][at], self._largest[index][at]

    def _of_type(self, dtype: DType) -> NDArray[Any]:
        """Return the columns of one type ``[S, C, W]``."""
        if dtype not in self._values:
            names = _NAMES[dtype]
            flat = np.concatenate([step.workers[name] for step in self._steps for name in names])
            self._values[dtype] = flat.reshape(len(self._steps), len(names), -1)
        return self._values[dtype]

    @cached_property
    def _alike(self) -> dict[DType, list[list[bool]]]:
        values = {dtype: self._of_type(dtype) for dtype in (DType.INT, DType.FLOAT)}
        return {dtype: (v == v[..., :1]).all(axis=2).tolist() for dtype, v in values.items()}

    @cached_property
    def _some_true(self) -> list[list[bool]]:
        return _listed(self._of_type(DType.BOOL).any(axis=2))

    @cached_property
    def _all_true(self) -> list[list[bool]]:
        return _listed(self._of_type(DType.BOOL).all(axis=2))

    @cached_property
    def _known(self) -> NDArray[np.bool_]:
        return np.asarray(self._of_type(DType.INT) != MISSING_INT)

    @cached_property
    def _some_known(self) -> list[list[bool]]:
        return _listed(self._known.any(axis=2))

    @cached_property
    def _all_known(self) -> list[list[bool]]:
        return _listed(self._known.all(axis=2))

    @cached_property
    def _smallest(self) -> list[list[float]]:
        return list(self._of_type(DType.FLOAT).min(axis=2).tolist())

    @cached_property
    def _largest(self) -> list[list[float]]:
        return list(self._of_type(DType.FLOAT).max(axis=2).tolist())


def _listed(flags: Any) -> list[list[bool]]:
    found: list[list[bool]] = flags.tolist()
    return found


Groups = Sequence[tuple[int, ...]]
"""Groups of ranks whose batches are identical."""


class Stretch:
    """Consecutive steps of as many workers, which are handled together.

    Args:
        reports: The steps, at least one.

    Attributes:
        reports: The same.
        steps: What the workers sent in them.
        columns: What the workers report in them.
    """

    def __init__(self, reports: Sequence[StepReport]) -> None:
        self.reports = reports
        self.steps = [report.gathered for report in reports]
        self.columns = Columns(self.steps)

    @cached_property
    def samples(self) -> DrawnSamples:
        """What the workers draw."""
        return DrawnSamples([step.samples for step in self.steps])

    @cached_property
    def token_products(self) -> list[tuple[float, float]]:
        """How the workers' losses go with their tokens in each step, for :class:`TokenSums`."""
        columns = self.columns
        return token_products_of_steps(columns["loss"], columns["loss_weight"])

    @cached_property
    def token_spreads(self) -> list[float]:
        """How far the weights of tokens lie apart in each step, see :func:`log_spread`."""
        spreads_S = log_spread(self.columns["grad_scale"], self.columns["loss_weight"])
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
        return self.stretch.columns.alike(name, self.index)

    def some_true(self, name: str) -> bool:
        """Return whether a flag is set on some worker."""
        return self.stretch.columns.some_true(name, self.index)

    def all_true(self, name: str) -> bool:
        """Return whether a flag is set on all workers."""
        return self.stretch.columns.all_true(name, self.index)

    def some_known(self, name: str) -> bool:
        """Return whether some worker has a value of an integer column."""
        return self.stretch.columns.some_known(name, self.index)

    def all_known(self, name: str) -> bool:
        """Return whether all workers have a value of an integer column."""
        return self.stretch.columns.all_known(name, self.index)

    def ends(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value of a float column; NaN if one is missing."""
        return self.stretch.columns.ends(name, self.index)

    @cached_property
    def token_products(self) -> tuple[float, float]:
        """How the workers' losses go with their tokens, for :class:`TokenSums`."""
        return self.stretch.token_products[self.index]


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


class Detector(Stateful):
    """Watches the stream of steps for one kind of fault.

    After ``close`` it may be asked for its state, and another of the same build may go on from
    there with the steps of a restarted job.
    """

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step, in order; return what is new or has changed."""
        raise NotImplementedError

    def close(self) -> Iterable[Evidence]:
        """End the run; return what had to wait for it."""
        return ()
