"""Consecutive steps as detectors receive them, with summaries that are computed once for all.

Legend of shapes: S or T steps, C columns of one type, W workers, N stored steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.evidence import DType
from rankscope.bus.replicas import digest_of_digests
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.stats.arrays import MISSING_INT, Floats, Ints, median
from rankscope.stats.draws import DrawnSamples, SortedMap
from rankscope.stats.samples import identical_groups
from rankscope.stats.state import Stateful
from rankscope.stats.tokens import follow_tokens, log_spread, token_products

LEAST_SCALER = 1024.0
"""A factor on the loss from which it is a gradient scaler's; anything smaller may be the loss's."""


def common_scale(gathered: GatheredStep) -> float:
    """Return the factor that most workers put on their loss; NaN when it is not known.

    Where multipliers follow label tokens, each worker has its own: then it is their mean, which
    leaves the reduced gradient of a mean over all tokens as it is.
    """
    scales_W = np.abs(gathered.workers["grad_scale"])
    first = float(scales_W[0])
    if 0 < first < math.inf and np.count_nonzero(scales_W == first) == len(scales_W):
        return first
    if follow_tokens(scales_W, gathered.workers["loss_weight"]):
        return float(scales_W.mean())
    known = scales_W[np.isfinite(scales_W) & (scales_W > 0)]
    return float(median(known)) if known.size else math.nan


REMEMBERED = 64
"""Stored batches of every worker."""

_GENERATION = 1 << 19


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Whether the batches of a step came before."""

    # how many steps ago each worker had the same batch; 0 where unknown, or not among the last 64
    ages_W: Ints
    before: int  # the latest step in which all workers had their present batches; -1 without
    recent_NW: Ints  # the digests of the last batches of every worker, this step's the last of them

    def num_distinct(self, worker: int, most: int) -> int:
        """Return how many of a worker's last ``most`` batches are distinct."""
        recent_N = self.recent_NW[-most:, worker]
        return len(np.unique(recent_N[recent_N != MISSING_INT]))


class RecentBatches(Stateful):
    """Stores the last batches of every worker, and in which steps all of them came together.

    A step without any known batch is passed over. Of the steps, 12 bytes each are stored in two
    generations: when the younger one is full, the older one is dropped.
    """

    def __init__(self, num_workers: int) -> None:
        self._recent_NW = np.full((REMEMBERED, num_workers), MISSING_INT, np.int64)
        self._young = SortedMap(np.int32)
        self._old = SortedMap(np.int32)

    def observe(self, digests_TW: Ints, steps: Sequence[int]) -> list[Recurrence]:
        """Process consecutive steps; return for each whether its batches came before."""
        known_T = (digests_TW != MISSING_INT).any(axis=1)
        history = np.concatenate([self._recent_NW, digests_TW[known_T]])
        self._recent_NW = history[-REMEMBERED:].copy()
        nothing = Recurrence(np.zeros(digests_TW.shape[1], np.int64), -1, history[:0])
        found = []
        end = REMEMBERED
        for digests_W, step, known in zip(digests_TW, steps, known_T.tolist(), strict=True):
            if not known:
                found.append(nothing)
                continue
            same_NW = (history[end - REMEMBERED : end] == digests_W) & (digests_W != MISSING_INT)
            ages_W = np.where(same_NW.any(axis=0), same_NW[::-1].argmax(axis=0) + 1, 0)
            end += 1
            before = self._latest(digest_of_digests(digests_W), step)
            found.append(Recurrence(ages_W, before, history[end - REMEMBERED : end]))
        return found

    def _latest(self, digest: int, step: int) -> int:
        """Return the latest step with this digest, and store this one in its place."""
        latest = self._young.get(digest), self._old.get(digest)
        if len(self._young) >= _GENERATION:
            self._young, self._old = self._old, self._young
            self._young.keep(lambda keys: np.zeros(len(keys), bool))
        self._young.put_one(digest, step)
        return max(-1 if at is None else at for at in latest)


_DOUBTS = 3
_SAME_LOSS = 1e-5
_OTHER_NORM = 2e-5  # more than another order of sums makes

_KINDS = {DType.INT: "i", DType.FLOAT: "f", DType.BOOL: "b"}


@cache
def _places(kinds: tuple[tuple[str, str], ...]) -> dict[str, tuple[DType, int]]:
    """Return type and place of each column, given names and kinds of their arrays."""
    names = {
        dtype: [name for name, kind in kinds if kind == wanted] for dtype, wanted in _KINDS.items()
    }
    return {name: (dtype, at) for dtype, each in names.items() for at, name in enumerate(each)}


_SUMMARIES: Mapping[str, Callable[[NDArray[Any]], Any]] = {
    "alike": lambda values: (values == values[..., :1]).all(axis=2),
    "some_true": lambda values: values.any(axis=2),
    "all_true": lambda values: values.all(axis=2),
    "some_known": lambda values: (values != MISSING_INT).any(axis=2),
    "all_known": lambda values: (values != MISSING_INT).all(axis=2),
    "smallest": lambda values: values.min(axis=2),
    "largest": lambda values: values.max(axis=2),
}
"""Summaries over the workers, from ``[S, C, W]`` to ``[S, C]``."""

RankGroups = Sequence[tuple[int, ...]]
"""Groups of ranks whose batches are identical."""


class WorkerColumns:
    """The workers' columns in consecutive steps; their summaries are computed once for all."""

    def __init__(self, reports: Sequence[StepReport], batches: RecentBatches) -> None:
        self.reports = reports
        self.numbers = [report.gathered.step for report in reports]
        workers = reports[0].gathered.workers
        self._places = _places(tuple((name, one.dtype.kind) for name, one in workers.items()))
        self._values: dict[DType, NDArray[Any]] = {}
        self._summaries: dict[tuple[str, DType], list[list[Any]]] = {}
        self.recurrences = batches.observe(self.column("batch_digest"), self.numbers)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the workers table ``[S, W]``."""
        dtype, at = self._places[name]
        column: NDArray[Any] = self._of_type(dtype)[:, at]
        return column

    def summary(self, what: str, name: str, index: int) -> Any:
        """Return a step's summary of a column; ``what`` is one of ``_SUMMARIES``."""
        dtype, at = self._places[name]
        if (what, dtype) not in self._summaries:
            self._summaries[what, dtype] = _SUMMARIES[what](self._of_type(dtype)).tolist()
        return self._summaries[what, dtype][index][at]

    def _of_type(self, dtype: DType) -> NDArray[Any]:
        """Return the columns of one type ``[S, C, W]``."""
        if dtype not in self._values:
            names = [name for name, (kind, _) in self._places.items() if kind is dtype]
            gathered = [report.gathered for report in self.reports]
            flat = np.concatenate([step.workers[name] for step in gathered for name in names])
            self._values[dtype] = flat.reshape(len(gathered), len(names), -1)
        return self._values[dtype]

    @cached_property
    def samples(self) -> DrawnSamples:
        """The samples that the workers draw."""
        return DrawnSamples([report.gathered.samples for report in self.reports])

    @cached_property
    def token_products(self) -> list[list[float]]:
        """Covariation of the workers' losses and tokens in each step, for ``TokenSums``."""
        products_S2 = token_products(self.column("loss"), self.column("loss_weight"))
        return list(products_S2.tolist())

    @cached_property
    def token_spreads(self) -> list[float]:
        """Spread of the tokens' weights in each step, see :func:`log_spread`."""
        spreads_S = log_spread(self.column("grad_scale"), self.column("loss_weight"))
        return [float(spread) for spread in spreads_S]


@dataclass
class Step:
    """One step of a batch."""

    report: StepReport
    columns: WorkerColumns  # the workers' columns in all steps of the batch
    index: int  # its place among them

    @property
    def gathered(self) -> GatheredStep:
        """The workers' values."""
        return self.report.gathered

    @property
    def recurrence(self) -> Recurrence:
        """Whether its batches came before."""
        return self.columns.recurrences[self.index]

    @cached_property
    def identical(self) -> RankGroups:
        """Groups of workers whose batches hold the same samples."""
        if self.columns.samples.all_differ(self.index):
            return ()
        return identical_groups(self.gathered.samples)

    def shares_work(self) -> bool | None:
        """Return whether workers with the same samples share the work on them; None if unknown."""
        workers = self.gathered.workers
        losses_W = workers["loss"]
        norms_W = workers["grad_norm"]
        if not np.isfinite([losses_W, norms_W]).all():
            return None
        groups = [list(group) for group in self.identical]
        return bool(groups) and all(
            _spread(losses_W[group]) <= _SAME_LOSS and _spread(norms_W[group]) > _OTHER_NORM
            for group in groups
        )

    def alike(self, name: str) -> bool:
        """Return whether all workers have the same value of a column; NaN is equal to nothing."""
        return bool(self.columns.summary("alike", name, self.index))

    def some_true(self, name: str) -> bool:
        """Return whether a flag is set on some worker."""
        return bool(self.columns.summary("some_true", name, self.index))

    def all_true(self, name: str) -> bool:
        """Return whether a flag is set on all workers."""
        return bool(self.columns.summary("all_true", name, self.index))

    def some_known(self, name: str) -> bool:
        """Return whether some worker has a value of an integer column."""
        return bool(self.columns.summary("some_known", name, self.index))

    def all_known(self, name: str) -> bool:
        """Return whether all workers have a value of an integer column."""
        return bool(self.columns.summary("all_known", name, self.index))

    def ends(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value of a float column; NaN if one is missing."""
        smallest, largest = (
            float(self.columns.summary(end, name, self.index)) for end in ("smallest", "largest")
        )
        return smallest, largest


class SharedWork(Stateful):
    """The workers that share the work on each sample, by the last steps that showed it.

    A step without gradients or without samples shows nothing, and one or two steps may look
    otherwise by chance.
    """

    def __init__(self) -> None:
        self.groups: RankGroups = ()  # those workers, group by group
        self._doubts = 0

    def observe(self, step: Step) -> RankGroups:
        """Process a step; return the groups, none where the workers of some group do not share."""
        shared = step.shares_work() if step.identical else None
        if shared:
            self.groups = step.identical
            self._doubts = 0
        elif shared is not None:
            self._doubts += 1
            if self._doubts >= _DOUBTS:
                self.groups = ()
        return self.groups

    def places(self, num_workers: int) -> Ints | None:
        """Return each worker's place in its group ``[W]``: those of one place hold the same.

        None where the workers do not fall into groups of one size.
        """
        members = [rank for group in self.groups for rank in group]
        if {len(group) for group in self.groups} != {num_workers // max(len(self.groups), 1)}:
            return None
        if sorted(members) != list(range(num_workers)):
            return None
        places_W = np.empty(num_workers, np.int64)
        for group in self.groups:
            places_W[list(group)] = np.arange(len(group))
        return places_W


class StepBatch:
    """One or more consecutive steps of the same number of workers."""

    def __init__(self, reports: Sequence[StepReport], batches: RecentBatches | None = None) -> None:
        batches = batches or RecentBatches(reports[0].gathered.num_workers)
        self.columns = WorkerColumns(reports, batches)
        self.numbers = self.columns.numbers
        self._steps = [Step(report, self.columns, at) for at, report in enumerate(reports)]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __getitem__(self, index: int) -> Step:
        return self._steps[index]


def batches_of(reports: Sequence[StepReport], batches: RecentBatches) -> Iterator[StepBatch]:
    """Yield batches of consecutive steps, cut where the number of workers changes."""
    for _, together in groupby(reports, lambda report: report.gathered.num_workers):
        yield StepBatch(list(together), batches)


def _spread(values: Floats) -> float:
    """Return the range of some values over the largest."""
    largest = float(np.abs(values).max())
    return float(np.ptp(values)) / largest if largest else 0.0
