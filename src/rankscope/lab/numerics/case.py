"""One world size and type: the gradients added up by every scheme, in every order tried.

Options and measurements are plain values.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.groups import group_parameters
from rankscope.errors import UsageError
from rankscope.lab.numerics.gradients import LocalGradients
from rankscope.lab.numerics.summation import (
    TYPES,
    Arithmetic,
    Divide,
    Scheme,
    num_buckets,
    reduce_buffers,
    sums_in_float64,
    to_buffers,
    worst_factor,
    worst_underflow,
)
from rankscope.stats.rounding import predicted_error, ulp_distance

MAX_WORKERS = 1024
MAX_ORDERS = 1000
MAX_ELEMENTS = 8192

ALL_ORDERS_UP_TO = 5
"""Workers up to which all orders are tried."""
LEAST_PER_LAYER = 256
"""A layer has at least so many elements in the sample, or all of its own."""


@dataclass(frozen=True, slots=True)
class SumOptions:
    """The options of a measurement.

    Attributes:
        workers: World sizes, rising, each at least 2.
        orders: Orders to try, at least 2; up to five workers all there are are tried instead.
        types: Types of the buffer; 16-bit ones are summed in 32 bits and in 16 bits.
        seed: Decides the orders, and gradients that are made up.
        divide: When the sum is divided by W.
        max_elements: Elements that take part, at most; more are sampled by layer.

    Raises:
        UsageError: A value is out of range.
    """

    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    orders: int = 32
    types: tuple[str, ...] = TYPES
    seed: int = 0
    divide: Divide = Divide.BEFORE
    max_elements: int = MAX_ELEMENTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(sorted(set(self.workers))))
        if not self.workers or self.workers[0] < 2 or self.workers[-1] > MAX_WORKERS:
            raise UsageError(
                f"expected numbers of workers from 2 to {MAX_WORKERS}, got "
                f"{', '.join(map(str, self.workers)) or 'none'}"
            )
        if not 2 <= self.orders <= MAX_ORDERS:
            raise UsageError(f"expected from 2 to {MAX_ORDERS} orders, got {self.orders}")
        unknown = [name for name in self.types if name not in TYPES]
        if unknown or not self.types:
            raise UsageError(
                f"expected some of the types {', '.join(TYPES)}, got {', '.join(unknown) or 'none'}"
            )
        if self.max_elements < 1:
            raise UsageError(f"expected at least one element, got {self.max_elements}")

    @property
    def arithmetics(self) -> Iterator[Arithmetic]:
        """All combinations of types."""
        for inputs in self.types:
            for sums in dict.fromkeys(("float32", inputs)):
                yield Arithmetic(inputs, sums, self.divide)


Values = dict[str, Any]
"""A part of the JSON form of measured sums, which ``numerics.spread`` describes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The elements that take part, in the buffer's order.

    Attributes:
        values_WN: Their gradients, one row for each worker that was given.
        positions_N: Where they stand in the buffer.
        weights_N: How many elements of the buffer each one stands for.
        layers: Name, elements of the whole layer, and which elements of the sample are its own.
        num_total: Elements of the buffer.
    """

    values_WN: NDArray[np.float32]
    positions_N: NDArray[np.int64]
    weights_N: NDArray[np.float64]
    layers: tuple[tuple[str, int, NDArray[np.int64]], ...]
    num_total: int


def draw_sample(gradients: LocalGradients, options: SumOptions) -> Sample:
    """Choose the elements that take part: evenly within each layer, all where there are few."""
    rng = np.random.default_rng([options.seed, 0])
    groups = group_parameters(gradients.arrays)
    index_of = groups.index_of
    total = gradients.num_elements
    sizes = [0] * len(groups)
    for name, array in gradients.arrays.items():
        sizes[index_of[name]] += array.shape[1]
    shares = [
        min(1.0, max(options.max_elements / total, min(LEAST_PER_LAYER, options.max_elements) / n))
        for n in sizes
    ]
    rows = []
    positions = []
    weights = []
    owners = []
    start = 0
    for name, array in gradients.arrays.items():
        size = array.shape[1]
        group = index_of[name]
        count = max(round(size * shares[group]), 1)
        chosen = np.sort(rng.choice(size, count, replace=False))
        rows.append(array[:, chosen])
        positions.append(start + chosen)
        weights.append(np.full(count, size / count))
        owners.append(np.full(count, group))
        start += size
    owner_N = np.concatenate(owners)
    layers = tuple(
        (name, sizes[group], np.flatnonzero(owner_N == group))
        for group, name in enumerate(groups.names)
    )
    return Sample(
        np.ascontiguousarray(np.concatenate(rows, axis=1)),
        np.concatenate(positions),
        np.concatenate(weights),
        layers,
        total,
    )


class Case:
    """One world size and type: sums by every scheme, in every order that is tried."""

    def __init__(
        self,
        values_WN: NDArray[np.float32],
        arithmetic: Arithmetic,
        sample: Sample,
        options: SumOptions,
    ) -> None:
        self._num_workers = len(values_WN)
        self._values_WN = values_WN
        self._arithmetic = arithmetic
        self._sample = sample
        self._options = options
        self._buffers_WN = to_buffers(values_WN, arithmetic)
        self._truth_N = sums_in_float64(values_WN) / self._num_workers
        self._sizes_N = np.abs(values_WN).mean(axis=0, dtype=np.float64)
        self._results: dict[Scheme, NDArray[np.float32]] = {}

    def cell(self, scheme: Scheme) -> Values:
        """Measure one scheme over all elements."""
        orders, everything = self._orders(scheme)
        results_KN = np.stack([self._reduce(scheme, order) for order in orders])
        self._results[scheme] = results_KN[0]
        finite_N = np.asarray(np.isfinite(results_KN).all(axis=0))
        low_N = results_KN.min(axis=0)
        high_N = results_KN.max(axis=0)
        distinct_N = np.ones(len(finite_N), dtype=np.int64)
        differs_N = ~(low_N == high_N)
        ordered = np.sort(results_KN[:, differs_N], axis=0)
        distinct_N[differs_N] += (ordered[1:] != ordered[:-1]).sum(axis=0)
        spread_N = ulp_distance(low_N, high_N, self._arithmetic.result)
        kept_KN = results_KN[:, finite_N].astype(np.float64)
        variance_N = kept_KN.var(axis=0, ddof=1)
        error_N = ((kept_KN - self._truth_N[finite_N]) ** 2).mean(axis=0)
        every = np.arange(len(finite_N))
        return dict(
            **self._kind(scheme),
            num_orders=len(orders),
            all_orders=everything,
            distinct_results=len({(row + np.float32(0)).tobytes() for row in results_KN}),
            distinct_per_element={"mean": distinct_N.mean(), "largest": distinct_N.max()},
            share_differing=self._mean(differs_N, every),
            share_not_finite=self._mean(~finite_N, every),
            spread_ulp=_ulps(spread_N[finite_N]),
            spread_relative=self._relative(np.ptp(kept_KN, axis=0) ** 2, finite_N),
            difference_relative=self._relative(2 * variance_N, finite_N),
            error_relative=self._relative(error_N, finite_N),
            **self._errors(scheme, every),
        )

    def layers(self, scheme: Scheme) -> Iterator[Values]:
        """Measure one scheme by layer, in the first order; :meth:`cell` must have run."""
        for name, size, own in self._sample.layers:
            finite = own[np.isfinite(self._results[scheme][own])]
            error = (self._results[scheme][finite].astype(np.float64) - self._truth_N[finite]) ** 2
            yield dict(
                layer=name,
                num_elements=size,
                **self._kind(scheme),
                error_relative=self._relative(error, finite),
                **self._errors(scheme, own),
                cosine=_cosine(self._values_WN[:, own], self._sample.weights_N[own]),
            )

    def _kind(self, scheme: Scheme) -> Values:
        kind = self._arithmetic
        return {
            "workers": self._num_workers,
            "inputs": kind.inputs,
            "sums": kind.sums,
            "result": kind.result,
            "algorithm": str(scheme),
        }

    def _errors(self, scheme: Scheme, own: NDArray[np.int64]) -> Values:
        """Return the error in units in the last place, and its prediction and bound."""
        kind = self._arithmetic
        W = self._num_workers
        bound = worst_factor(W, scheme, kind) * self._sizes_N[own] + worst_underflow(W, kind)
        ulp = ulp_distance(self._results[scheme][own], self._truth_N[own], kind.result)
        predicted = predicted_error(
            W,
            sums=kind.sums,
            inputs=None if kind.inputs == "float32" else kind.inputs,
            result=None if kind.result == kind.sums else kind.result,
            algorithm=scheme.algorithm,
            cosine=_cosine(self._values_WN[:, own], self._sample.weights_N[own]),
        )
        return {
            "error_ulp": _ulps(ulp[np.isfinite(self._results[scheme][own])]),
            "predicted_relative": predicted,
            "bound_relative": self._relative(bound**2, own),
        }

    def _orders(self, scheme: Scheme) -> tuple[list[NDArray[np.int64]], bool]:
        """Return the orders to try, rank order first, and whether these are all."""
        W = self._num_workers
        options = self._options
        buckets = num_buckets(self._sample.num_total) if scheme is Scheme.ARRIVAL else 1
        shape = (buckets, W) if scheme is Scheme.ARRIVAL else (W,)
        if W <= ALL_ORDERS_UP_TO and buckets == 1:
            found = [np.array(order).reshape(shape) for order in itertools.permutations(range(W))]
            return found, True
        rng = np.random.default_rng([options.seed, W, list(Scheme).index(scheme)])
        in_rank_order = np.broadcast_to(np.arange(W), shape)
        count = max(options.orders, math.factorial(W) if W <= ALL_ORDERS_UP_TO else 0)
        return [
            in_rank_order,
            *(rng.permuted(in_rank_order, axis=-1) for _ in range(count - 1)),
        ], False

    def _reduce(self, scheme: Scheme, order: NDArray[np.int64]) -> NDArray[np.float32]:
        return reduce_buffers(
            self._buffers_WN,
            scheme,
            self._arithmetic,
            order,
            positions_N=self._sample.positions_N,
            num_total=self._sample.num_total,
        )

    def _mean(self, flags: NDArray[np.bool_], own: NDArray[np.int64]) -> float:
        return float(np.average(flags, weights=self._sample.weights_N[own]))

    def _relative(self, squares: NDArray[np.float64], own: NDArray[Any]) -> float:
        """Return the square root of the sum of squares, over the norm of the true mean."""
        if not len(squares):
            return math.nan
        weights = self._sample.weights_N[own]
        size = float((weights * self._truth_N[own] ** 2).sum())
        total = float((weights * squares).sum())
        return math.sqrt(total / size) if size > 0 else (0.0 if total == 0 else math.inf)


def describe_world(values_WN: NDArray[np.float32], made_up: int, sample: Sample) -> Values:
    """Measure the gradients of a world size: cosine, cancellation, noise."""
    num_workers = len(values_WN)
    wide_WN = values_WN.astype(np.float64)
    mean_N = wide_WN.mean(axis=0)
    sizes_N = np.abs(wide_WN).mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        cancellation = sizes_N / np.abs(mean_N)
    known = cancellation[~np.isnan(cancellation)]
    variance = (sample.weights_N * wide_WN.var(axis=0, ddof=1)).sum() / num_workers
    size = (sample.weights_N * mean_N**2).sum()
    return {
        "workers": num_workers,
        "made_up": made_up,
        "cosine": _cosine(values_WN, sample.weights_N),
        "cancellation": float(np.median(known)) if len(known) else math.nan,
        "noise_relative": float(np.sqrt(variance / size)) if size > 0 else math.inf,
    }


def _cosine(values_WN: NDArray[np.float32], weights_N: NDArray[np.float64]) -> float:
    """Return the mean cosine over pairs, weighted by norms."""
    num_workers = len(values_WN)
    wide_WN = values_WN.astype(np.float64)
    own = (weights_N * wide_WN**2).sum()
    total = (weights_N * wide_WN.sum(axis=0) ** 2).sum()
    return float((total - own) / ((num_workers - 1) * own)) if own > 0 else math.nan


def _ulps(distances: NDArray[np.float64]) -> Values:
    found = np.quantile(distances, [0.5, 0.99, 1.0]) if len(distances) else [math.nan] * 3
    return dict(zip(("median", "p99", "largest"), found, strict=True))
