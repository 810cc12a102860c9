"""How much sums of gradients differ between orders, types and world sizes, and from the truth.

:func:`measure` takes the local gradients of W workers and returns plain JSON values, which the
figures and the command read: the source, the options, notes, ``worlds`` (one for each world size),
``cells`` (one for each world size, combination of types and algorithm), ``layers`` (one for each
layer, combination of types and algorithm, at the largest world size) and three sentences: why two
runs differ, whether it matters, and what to do. Numbers that are undefined or not finite are None.

"Relative" is in Euclidean norm over all elements, over that of the true mean. Distributions over
elements are ``{"median", "p99", "largest"}``, in units in the last place of the buffer's type: 99 %
of the elements have at most ``p99``; the largest is that of an element whose gradients cancel
almost entirely.

The order of a cell's algorithm is a permutation of the workers (which place in the chain, ring or
tree each of them has); for ``arrival`` it is one permutation for each bucket.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.groups import group_parameters
from rankscope.errors import UsageError
from rankscope.files import to_plain
from rankscope.lab.numerics import Progress, no_progress
from rankscope.lab.numerics.gradients import LocalGradients, for_workers
from rankscope.lab.numerics.summation import (
    TYPES,
    Arithmetic,
    Scheme,
    num_buckets,
    reduce_buffers,
    to_buffers,
    worst_factor,
    worst_underflow,
)
from rankscope.stats.rounding import predicted_error, ulp_distance

MAX_WORKERS = 1024
MAX_ORDERS = 1000
MAX_ELEMENTS = 8192  # elements that take part, at most; more are sampled by layer
ALL_ORDERS_UP_TO = 5  # workers up to which all orders are tried
LEAST_PER_LAYER = 256  # a layer has at least so many elements in the sample, or all of its own


@dataclass(frozen=True, slots=True)
class SumOptions:
    """The options of a measurement."""

    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # world sizes, rising, each at least 2
    # orders to try, at least 2; up to five workers all there are are tried instead
    orders: int = 32
    # types of the buffer; 16-bit ones are summed in 32 bits and in 16 bits
    types: tuple[str, ...] = TYPES
    seed: int = 0  # decides the orders, and gradients that are made up

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

    @property
    def arithmetics(self) -> Iterator[Arithmetic]:
        """All combinations of types."""
        for inputs in self.types:
            for sums in dict.fromkeys(("float32", inputs)):
                yield Arithmetic(inputs, sums)


Values = dict[str, Any]  # a part of the JSON form of measured sums


@dataclass(frozen=True, slots=True)
class Sample:
    """The elements that take part, in the buffer's order: their gradients, a row a worker.

    ``positions_N`` is where they stand in the buffer of ``num_total`` elements, ``weights_N`` how
    many of these each stands for; ``layers`` are name, elements of the whole layer, and which
    elements of the sample are its own.
    """

    values_WN: NDArray[np.float32]
    positions_N: NDArray[np.int64]
    weights_N: NDArray[np.float64]
    layers: tuple[tuple[str, int, NDArray[np.int64]], ...]
    num_total: int


def draw_sample(gradients: LocalGradients, seed: int) -> Sample:
    """Choose the elements that take part: evenly within each layer, all where there are few."""
    rng = np.random.default_rng([seed, 0])
    groups = group_parameters(gradients.arrays)
    index_of = groups.index_of
    total = gradients.num_elements
    sizes = [0] * len(groups)
    for name, array in gradients.arrays.items():
        sizes[index_of[name]] += array.shape[1]
    shares = [min(1.0, max(MAX_ELEMENTS / total, LEAST_PER_LAYER / n)) for n in sizes]
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
        self._truth_N = values_WN.sum(axis=0, dtype=np.float64) / self._num_workers
        self._sizes_N = np.abs(values_WN).mean(axis=0, dtype=np.float64)
        self._results: dict[Scheme, NDArray[np.float32]] = {}

    def cell(self, scheme: Scheme) -> Values:
        """Measure one scheme over all elements."""
        orders, everything = self._orders(scheme)
        results_KN = np.stack(
            [
                reduce_buffers(
                    self._buffers_WN,
                    scheme,
                    self._arithmetic,
                    order,
                    positions_N=self._sample.positions_N,
                    num_total=self._sample.num_total,
                )
                for order in orders
            ]
        )
        self._results[scheme] = results_KN[0]
        finite_N = np.asarray(np.isfinite(results_KN).all(axis=0))
        low_N = results_KN.min(axis=0)
        high_N = results_KN.max(axis=0)
        distinct_N = np.ones(len(finite_N), dtype=np.int64)
        differs_N = ~(low_N == high_N)
        ordered = np.sort(results_KN[:, differs_N], axis=0)
        distinct_N[differs_N] += (ordered[1:] != ordered[:-1]).sum(axis=0)
        spread_N = ulp_distance(low_N, high_N, self._arithmetic.inputs)
        kept_KN = results_KN[:, finite_N].astype(np.float64)
        variance_N = kept_KN.var(axis=0, ddof=1)
        error_N = ((kept_KN - self._truth_N[finite_N]) ** 2).mean(axis=0)
        every = np.arange(len(finite_N))
        # Elements that overflow in some order, as in float16, are left out of spread and error.
        return dict(
            **self._kind(scheme),
            num_orders=len(orders),
            all_orders=everything,
            distinct_results=len({(row + np.float32(0)).tobytes() for row in results_KN}),
            distinct_per_element={"mean": distinct_N.mean(), "largest": distinct_N.max()},
            share_differing=float(np.average(differs_N, weights=self._sample.weights_N)),
            share_not_finite=float(np.average(~finite_N, weights=self._sample.weights_N)),
            spread_ulp=_ulps(spread_N[finite_N]),
            spread_relative=self._relative(np.ptp(kept_KN, axis=0) ** 2, finite_N),
            difference_relative=self._relative(2 * variance_N, finite_N),  # of pairs of orders
            error_relative=self._relative(error_N, finite_N),  # root mean square over orders
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
            "result": kind.inputs,
            "algorithm": str(scheme),
        }

    def _errors(self, scheme: Scheme, own: NDArray[np.int64]) -> Values:
        """Return the error in units in the last place, and its prediction and bound."""
        kind = self._arithmetic
        W = self._num_workers
        bound = worst_factor(W, scheme, kind) * self._sizes_N[own] + worst_underflow(W, kind)
        ulp = ulp_distance(self._results[scheme][own], self._truth_N[own], kind.inputs)
        predicted = predicted_error(
            W,
            sums=kind.sums,
            inputs=None if kind.inputs == "float32" else kind.inputs,
            result=None if kind.inputs == kind.sums else kind.inputs,
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

    def _relative(self, squares: NDArray[np.float64], own: NDArray[Any]) -> float:
        """Return the square root of the sum of squares, over the norm of the true mean."""
        if not len(squares):
            return math.nan
        weights = self._sample.weights_N[own]
        size = float((weights * self._truth_N[own] ** 2).sum())
        total = float((weights * squares).sum())
        return math.sqrt(total / size) if size > 0 else (0.0 if total == 0 else math.inf)


def describe_world(values_WN: NDArray[np.float32], made_up: int, sample: Sample) -> Values:
    """Measure the gradients of a world size.

    ``cosine`` is the mean over pairs of workers, ``cancellation`` the median over elements of
    ``sum |x| / |sum x|``, and ``noise_relative`` the standard error of the mean over workers: how
    far other samples of the same data would move it.
    """
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


FAR_BEYOND = 3  # an error so many times what rounding predicts has another reason


def measure(
    gradients: LocalGradients,
    options: SumOptions | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Add the gradients up in many ways, and compare the results."""
    options = options or SumOptions()
    sample = draw_sample(gradients, options.seed)
    worlds: list[Values] = []
    cells: list[Values] = []
    layers: list[Values] = []
    arithmetics = list(options.arithmetics)
    todo = [(W, kind) for W in options.workers for kind in arithmetics]
    for done, (num_workers, arithmetic) in enumerate(todo):
        progress(f"sums over {num_workers} workers", done, len(todo))
        if arithmetic is arithmetics[0]:
            values_WN, made_up = for_workers(
                sample.values_WN, num_workers, np.random.default_rng([options.seed, num_workers])
            )
            worlds.append(describe_world(values_WN, made_up, sample))
        case = Case(values_WN, arithmetic, sample, options)
        for scheme in Scheme:
            cells.append(case.cell(scheme))
            if num_workers == options.workers[-1]:
                layers += case.layers(scheme)
    progress("sums", len(todo), len(todo))
    sums: dict[str, Any] = to_plain(
        {
            "kind": "sums",
            "source": {
                "kind": gradients.kind,
                "name": gradients.name,
                "num_gradients": gradients.num_workers,
                "num_elements": gradients.num_elements,
                "num_measured": sample.values_WN.shape[1],
            },
            "options": {**asdict(options), "divide": "before"},  # by W, before the sum
            "notes": [*_notes(gradients, sample, worlds), *_limits_of_float16(cells, layers)],
            "worlds": worlds,
            "cells": cells,
            "layers": layers,
        }
    )
    return {**sums, "sentences": sentences(sums)}


def _notes(gradients: LocalGradients, sample: Sample, worlds: Sequence[Values]) -> Iterator[str]:
    count = sample.values_WN.shape[1]
    total = sample.num_total
    if count < total:
        yield f"{count:,} of {total:,} elements were measured, sampled evenly within each layer."
    made_up = [str(world["workers"]) for world in worlds if world["made_up"]]
    if made_up:
        yield (
            f"There are gradients of {gradients.num_workers} workers; for {', '.join(made_up)} "
            "workers the missing ones were made up, with the norm and the cosines of the given "
            "ones: their mean, less what chance adds to it, plus a random mixture of their "
            "deviations from it."
        )


def _limits_of_float16(cells: Sequence[Values], layers: Sequence[Values]) -> Iterator[str]:
    """Report where float16 has too few small or large numbers."""
    lost = {
        layer["layer"]: layer["error_relative"]
        for layer in layers
        if layer["inputs"] == "float16"
        and layer["error_relative"] > FAR_BEYOND * layer["predicted_relative"]
    }
    if lost:
        shown = ", ".join(list(lost)[:3]) + (", …" if len(lost) > 3 else "")
        yield (
            f"float16 is too coarse for the smallest gradients, of {shown}: their error is up to "
            f"{max(lost.values()):.0e}, more than {FAR_BEYOND} times that of rounding, because its "
            "smallest positive number is 6e-08; scale the loss, or use bfloat16."
        )
    if any(cell["share_not_finite"] for cell in cells):
        share = max(cell["share_not_finite"] for cell in cells)
        yield (
            f"Up to {100 * share:.2g} % of the sums overflowed in float16, whose largest number is "
            "65,504; they are left out of its errors."
        )


USUAL_WORKERS = 8  # world size that sentences are about, when it was measured


def usual_workers(sums: Mapping[str, Any]) -> int:
    """Return the world size of single numbers: 8 if it was measured, else the largest."""
    numbers = [int(world["workers"]) for world in sums["worlds"]]
    return USUAL_WORKERS if USUAL_WORKERS in numbers else numbers[-1]


def sentences(sums: Values) -> list[str]:
    """Return why two runs differ, whether it matters, and what to do, from measured sums."""
    workers = usual_workers(sums)
    [world] = [world for world in sums["worlds"] if world["workers"] == workers]
    cells = [c for c in sums["cells"] if c["workers"] == workers and c["algorithm"] == "ring"]
    return [_why(cells), _whether(cells, world), _what(cells)]


def size(value: float | None) -> str:
    """Return a relative size in a few characters: ``2e-08``, ``0.4 %`` or ``61 %``."""
    if value is None:
        return "?"
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{value:.0e}"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.1g} %"


def types(cell: Values) -> str:
    """Return the types of a reduction in words: ``bfloat16 added in float32``."""
    inputs = str(cell["inputs"])
    sums = str(cell["sums"])
    return inputs if inputs == sums else f"{inputs} added in {sums}"


def _why(cells: Sequence[Values]) -> str:
    cell = next((cell for cell in cells if cell["distinct_results"] > 1), cells[0])
    orders = f"{'all ' if cell['all_orders'] else ''}{cell['num_orders']} orders"
    if cell["distinct_results"] == 1:
        return (
            f"Why two runs differ: not because of the order of these sums; the same "
            f"{cell['workers']} gradients gave the same bits in {orders}."
        )
    return (
        f"Why two runs differ: the same {cell['workers']} gradients, added up around a ring in "
        f"{orders} ({types(cell)}), came back as {cell['distinct_results']} different results, "
        f"and {100 * cell['share_differing']:.1f} % of the elements depend on the order."
    )


def _whether(cells: Sequence[Values], world: Values) -> str:
    differing = [cell for cell in cells if cell["difference_relative"]]
    same = [types(cell) for cell in cells if cell["difference_relative"] == 0]
    parts = [f"by {size(cell['difference_relative'])} in {types(cell)}" for cell in differing]
    if same:
        parts.append(f"not at all in {' and '.join(same)}")
    text = f"Does it matter: two orders differ {', '.join(parts)} (of the gradient's length)"
    noise = world["noise_relative"]
    largest = max((cell["difference_relative"] for cell in differing), default=0.0)
    if not noise or not differing:
        return f"{text}."
    verdict = (
        f"other samples of the same data would move it by {size(noise)}, so no step is worse for "
        "it, but the weights part from the first differing bit on"
        if largest < noise / 10
        else f"other samples of the same data would move it by {size(noise)}, so the coarsest of "
        "these sums adds a noise that is not small beside that of the data"
    )
    return f"{text}; {verdict}."


def _what(cells: Sequence[Values]) -> str:
    text = (
        "What to do: fix the order of the sum (rankscope.fixed_order) or make the sum independent "
        "of it (rankscope.order_free) where the same bits are needed, and let rankscope diff tell "
        "rounding from a bug where they are not"
    )
    for cell in cells:
        wide = [c for c in cells if c["inputs"] == cell["inputs"] and c["sums"] == "float32"]
        if cell["sums"] == "float32" or not wide:
            continue
        coarse = cell["error_relative"]
        fine = wide[0]["error_relative"]
        if coarse is not None and fine is not None and coarse > 1.2 * fine:
            return (
                f"{text}; with {cell['inputs']} gradients keep partial sums in float32, which "
                f"brings the error from {size(coarse)} down to {size(fine)}."
            )
    return f"{text}."
