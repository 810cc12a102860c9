"""The items that are digested in one step, and their digests on the way to the host.

Digests are sums modulo 2^64 over parts, each times an odd weight: of a tensor's slices, and of what
an optimizer keeps for each.
"""

import math
from array import array
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from rankscope.bus.probe import Awaited, MessagePart
from rankscope.bus.replicas import StateDigests, StateKind, digest_of_digests
from rankscope.evidence.state.plan import Item, Slice
from rankscope.evidence.state.readings import CachedReading, PendingReading
from rankscope.evidence.state.roles import Roles
from rankscope.gradients.digest import word_of
from rankscope.stats.arrays import how_far

_COLUMNS = {
    StateKind.PARAMETER: "param_digest",
    StateKind.BUFFER: "buffer_digest",
    StateKind.STATISTICS: "buffer_digest",
    StateKind.OPTIMIZER: "optimizer_digest",
    StateKind.REDUCED: "reduced_digest",
    StateKind.APPLIED: "applied_digest",
}
_GRADIENTS = (StateKind.REDUCED, StateKind.APPLIED)
_ALWAYS = frozenset(StateKind) - {StateKind.BROADCAST}
_NO_GRADIENTS = frozenset(StateKind) - {*_GRADIENTS}

_MASK = (1 << 64) - 1
_FEWEST = 3  # gradients, to estimate the factor that most share
_SAME_FACTOR = 0.01  # relative: rounding in bfloat16, over a few elements
_MOST_LOCAL = 8  # cached sets of local gradients of a slot


class Rows:
    """The digests of one kind in a step, and the slices that each is made of."""

    def __init__(self, kind: StateKind, items: Sequence[Item], first: int = 0) -> None:
        before = 0
        self.slices: list[Slice] = []
        self.rows: list[int] = []
        self.ends: list[int] = []
        for item in items:
            if kind in item.kinds:
                self.rows.append(before + item.kinds.index(kind))
                self.slices += item.slices
                self.ends.append(len(self.slices))
            before += len(item.kinds)
        self.kind = kind
        self.first = first
        step = self.rows[1] - self.rows[0] if len(self.rows) > 1 else 1
        places = range(self.rows[0], self.rows[-1] + 1, step) if self.rows else range(0)
        regular = self.rows == list(places)
        self._places = slice(places.start, places.stop, step) if regular else None

    def fill(self, digests: list[int], parts: list[int]) -> int | None:
        """Fill in one digest per row from one per slice; return a digest of all, if any."""
        if len(self.rows) < len(self.slices):
            parts = self._joined(parts)
        self.put(digests, parts)
        return digest_of_digests(array("Q", parts)) if parts else None

    def put(self, into: Any, values: Sequence[Any]) -> None:
        """Put one value per row into the items' values."""
        if self._places is not None:
            into[self._places] = values
        else:
            for row, value in zip(self.rows, values, strict=True):
                into[row] = value

    def _joined(self, parts: list[int]) -> list[int]:
        joined = []
        start = 0
        for end in self.ends:
            if end - start == 1:
                joined.append(parts[start])
            else:
                pairs = zip(_weights(end - start), parts[start:end], strict=True)
                joined.append(sum(weight * part for weight, part in pairs) & _MASK)
            start = end
        return joined


class LocalDigests(NamedTuple):
    """The slices to read of local gradients that arrive together."""

    numbers: tuple[int, ...]
    slices: tuple[Slice, ...]
    sources: tuple[int, ...]  # number of the gradient of each slice
    cached: CachedReading


class CachedReadings:
    """Readings of a slot's earlier steps."""

    def __init__(self) -> None:
        self.state = CachedReading()  # parameters and optimizer state
        self.buffers = CachedReading()  # buffers before the first forward pass
        self.marks: list[object] = []  # names of the optimizer state that was read
        self.leaves: tuple[Sequence[int], Sequence[int]] = ((), ())  # weights, starts
        self.gradients = CachedReading()  # reduced gradients and applied gradients
        self.broadcast = CachedReading()  # running statistics after their broadcast
        self.local: dict[tuple[str, ...], LocalDigests] = {}  # by names of parameters


class DigestSlot:
    """The items that are compared in a step, in the order of their digests."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.kinds = tuple(kind for item in items for kind in item.kinds)
        self.names = tuple(item.name for item in items for _ in item.kinds)
        self.parameters = Rows(StateKind.PARAMETER, items)
        buffers = Rows(StateKind.BUFFER, items)
        statistics = Rows(StateKind.STATISTICS, items, len(buffers.slices))
        self.buffers = (buffers, statistics)
        self.read_before = [*buffers.slices, *statistics.slices]
        self.broadcast = Rows(StateKind.BROADCAST, items)
        self.optimizer = Rows(StateKind.OPTIMIZER, items)
        self.reduced = Rows(StateKind.REDUCED, items)
        self.applied = Rows(StateKind.APPLIED, items)
        numbers = {part: number for number, part in enumerate(self.parameters.slices)}
        self.parameters_with_state = [numbers[part] for part in self.optimizer.slices]
        """Numbers of the parameters for which the optimizer keeps state."""
        self.cached = CachedReadings()
        self.wanted: dict[str, list[tuple[int, Slice]]] = {}
        """Slices of reduced gradients and their numbers, by the parameter's name."""
        for number, part in enumerate(self.reduced.slices):
            self.wanted.setdefault(part.place.name, []).append((number, part))

    def local_of(self, names: tuple[str, ...]) -> LocalDigests:
        """Return the slices to read of the local gradients of parameters."""
        cached = self.cached.local
        local = cached.get(names)
        if local is None:
            if len(cached) >= _MOST_LOCAL:
                cached.clear()
            read = [
                (number, part, source)
                for source, name in enumerate(names)
                for number, part in self.wanted.get(name, ())
            ]
            numbers, slices, sources = zip(*read, strict=True) if read else ((), (), ())
            local = cached[names] = LocalDigests(numbers, slices, sources, CachedReading())
        return local


@dataclass(slots=True)
class StepReadings:
    """The readings of one step; None for those that were not taken."""

    state: PendingReading | None = None  # parameters, then optimizer state, after the step
    weights: Sequence[int] = ()  # of the leaves of the optimizer state
    starts: Sequence[int] = ()  # number of each slice's first leaf
    gradients: dict[StateKind, PendingReading] = field(default_factory=dict)  # reduced, applied
    in_turn: list[PendingReading] = field(default_factory=list)  # of what each optimizer applies
    reduced_in_turn: bool = False  # they are the reduced gradients, too
    applied: set[int] = field(default_factory=set)  # ids of the parameters in them
    begun: set[int] = field(default_factory=set)  # and of those of optimizers that were called
    before: CachedReading | None = None  # last reading of gradients
    local: dict[tuple[int, ...], PendingReading] = field(default_factory=dict)
    reduced: Sequence[bool] | None = None  # slices whose gradient is reduced; None if all are
    broadcast: PendingReading | None = None  # running statistics right after DDP has broadcast them
    buffers: PendingReading | None = None  # as the step's first forward pass finds them


def with_digests(
    roles: Roles, left_out: Iterable[str], replaced: Iterable[str], reading: PendingReading
) -> Roles:
    """Wait for the device; return roles with the digests of some parameters, in this order."""
    digests = iter([digest >> 1 for digest in reading.read()[0]])
    return replace(
        roles,
        left_out=dict(zip(left_out, digests, strict=False)),
        replaced=dict(zip(replaced, digests, strict=False)),
    )


@dataclass(slots=True)
class PendingState:
    """The digests of one step on their way to the host."""

    slot: DigestSlot
    seen: StepReadings
    layout: int | None  # digest of the plan; None without one
    roles: Awaited[Roles] | None  # of the worker's parameters; None in most steps
    sent: bool  # DDP broadcasts running statistics; else they are buffers like others
    finds_changed: bool  # look for gradients that were changed after the reduction
    replicated: bool  # else digests of gradients would only differ, and are left out
    summed: Container[str]  # over other ranks after the reduction, which is no change
    resting: Collection[str]  # parameters of optimizers that the step has not called
    set_aside: bool  # an earlier gradient was: one that is no multiple of the last may hold both
    known: set[int] | None = None  # digests of the names that the root has; None: it needs none
    changed: tuple[str, ...] = ()  # gradients changed otherwise than most; known once read

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        seen = self.seen
        readings = [*seen.gradients.values(), *seen.in_turn, *seen.local.values()]
        others = (seen.state, seen.broadcast, seen.buffers)
        readings += [one for one in others if one is not None]
        roles = self.roles is None or self.roles.ready
        return roles and all(reading.ready for reading in readings)

    def read(self) -> MessagePart:
        """Wait for the device."""
        state, values = self.digests()
        names: dict[str, Any] = {}
        if self.known is not None and len(state.names) and state.items not in self.known:
            self.known.add(state.items)
            names["items"] = [[state.items, list(map(str, state.kinds)), list(state.names)]]
        if self.changed:
            names["changed"] = list(self.changed)
        if self.roles is not None:
            names["roles"] = self.roles.read().to_json(named=self.known is not None)
        arrays = {
            "digests_D": state.digests_D.tobytes(),
            "unchanged_D": state.unchanged_D.tobytes(),
        }
        return MessagePart(values, arrays, names, state.items)

    def digests(self) -> tuple[StateDigests, dict[str, float | int]]:
        """Wait for the device; return the digests, and values by column."""
        slot = self.slot
        values: dict[str, float | int] = {}
        if self.layout is not None:
            values["state_layout"] = self.layout
        if slot is NO_SLOT:
            return _NO_DIGESTS, values
        digests = [0] * len(slot.kinds)
        unchanged = bytearray(len(slot.kinds))
        if self.seen.state is not None:
            self._read_state(self.seen.state, digests, values)
        self._read_gradients(digests, unchanged, values)
        digests_D = np.frombuffer(array("Q", digests), np.int64)
        state = StateDigests(slot.kinds, slot.names, digests_D, np.frombuffer(unchanged, bool))
        if not self.replicated:
            state = _only(state, _NO_GRADIENTS)
        if self.seen.state is None:
            return _only(state, _GRADIENTS), values
        if self.seen.broadcast is None and slot.broadcast.slices:
            state = _only(state, _ALWAYS)
        if not self.sent:
            buffer = {StateKind.STATISTICS: StateKind.BUFFER}
            state = replace(state, kinds=tuple(buffer.get(kind, kind) for kind in state.kinds))
        return state, values

    def _read_state(
        self, reading: PendingReading, digests: list[int], values: dict[str, float | int]
    ) -> None:
        slot = self.slot
        seen = self.seen
        parts, _ = reading.read()
        count = len(slot.parameters.slices)
        _set_digest(values, slot.parameters, slot.parameters.fill(digests, parts[:count]))
        if seen.buffers is not None:
            before, _ = seen.buffers.read()
            for rows in slot.buffers:
                own = before[rows.first : rows.first + len(rows.slices)]
                _set_digest(values, rows, rows.fill(digests, own))
        if seen.broadcast is not None:
            slot.broadcast.fill(digests, seen.broadcast.read()[0])
        weighted = list(map(mul, seen.weights, parts[count:]))
        limits = pairwise((*seen.starts, len(weighted)))
        sums = [sum(weighted[first:last]) & _MASK for first, last in limits]
        _set_digest(values, slot.optimizer, slot.optimizer.fill(digests, sums))

    def _read_gradients(
        self, digests: list[int], unchanged: bytearray, values: dict[str, float | int]
    ) -> None:
        squares: dict[StateKind, float] = {}
        each: list[list[float]] = []
        for rows in (self.slot.reduced, self.slot.applied):
            reading = self.seen.gradients.get(rows.kind)
            if reading is not None:
                parts, parts_squares = reading.read()
            elif self.seen.in_turn and (
                rows.kind is StateKind.APPLIED or self.seen.reduced_in_turn
            ):
                parts, parts_squares = _joined(self.seen.in_turn)
            else:
                continue
            digest = rows.fill(digests, parts)
            if self.replicated:
                _set_digest(values, rows, digest)
            each.append([parts_squares[number] for number, _ in self._counted(rows)])
            squares[rows.kind] = sum(each[-1])
            if rows.kind is StateKind.REDUCED:
                self._fill_unchanged(unchanged, parts)
        reduced = squares.get(StateKind.REDUCED, 0.0)
        if StateKind.APPLIED in squares and 0 < reduced < math.inf:
            spread = spread_of_factors(*each)
            if self.set_aside and not spread <= _SAME_FACTOR:
                return
            values["applied_scale"] = math.sqrt(squares[StateKind.APPLIED] / reduced)
            values["applied_spread"] = spread
            if not self.finds_changed:
                return
            factor, odd = odd_factors(*each)
            values["applied_odd"] = factor
            names = [name for _, name in self._counted(self.slot.reduced)]
            self.changed = tuple(dict.fromkeys(names[number] for number in odd))

    def _counted(self, rows: Rows) -> list[tuple[int, str]]:
        """Return number and name of the slices that the step clips or scales, if any."""
        names = [part.place.name for part in rows.slices]
        return [
            (number, name)
            for number, name in enumerate(names)
            if name not in self.summed and name not in self.resting
        ]

    def _fill_unchanged(self, unchanged: bytearray, parts: list[int]) -> None:
        """Fill in which gradients the reduction left as they were, in all their slices."""
        seen = self.seen
        rows = self.slot.reduced
        before: dict[int, int] = {}
        for numbers, reading in seen.local.items():
            before.update(zip(numbers, reading.read()[0], strict=True))
        same = [before.get(number) == part for number, part in enumerate(parts)]
        if seen.reduced is not None:
            same = [one or not reduced for one, reduced in zip(same, seen.reduced, strict=True)]
        if len(rows.rows) < len(same):
            same = [all(same[first:last]) for first, last in pairwise((0, *rows.ends))]
        rows.put(unchanged, bytes(same))


def _joined(readings: Sequence[PendingReading]) -> tuple[list[int], list[float]]:
    """Return the digests and squares of readings that lack what is in others, where they are 0."""
    digests, squares = zip(*(reading.read() for reading in readings), strict=True)
    return list(map(sum, zip(*digests, strict=True))), list(map(sum, zip(*squares, strict=True)))


def spread_of_factors(reduced_N: Sequence[float], applied_N: Sequence[float]) -> float:
    """Return how far apart the factors are by which gradients were scaled between two moments.

    Given are their squared norms right after the reduction, and when the optimizer was called. It
    is the largest minus the smallest factor, over the largest; NaN with fewer than two of them.

    Example:
        >>> spread_of_factors([4.0, 1.0, 9.0], [1.0, 0.25, 9.0])  # 0.5, 0.5 and 1
        0.5
    """
    factors = _factors(reduced_N, applied_N).values()
    if len(factors) < _FEWEST - 1:
        return math.nan
    largest = max(factors)
    return (largest - min(factors)) / largest if largest else 0.0


def _factors(reduced_N: Sequence[float], applied_N: Sequence[float]) -> dict[int, float]:
    """Return the factors that are known, by the number of their gradient."""
    pairs = enumerate(zip(reduced_N, applied_N, strict=True))
    return {
        number: math.sqrt(applied / reduced)
        for number, (reduced, applied) in pairs
        if 0 < reduced < math.inf and 0 <= applied < math.inf
    }


def odd_factors(
    reduced_N: Sequence[float], applied_N: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """Return which gradients were scaled otherwise than most between two moments.

    Clipping by the norm and unscaling multiply all of them by one factor. Where some were left as
    they were, that is 1; otherwise that of most. Returned are the ratio of the most deviating
    factor to the common one, and the numbers of the gradients that deviate. The ratio is 1 if none
    does; NaN where fewer than three factors are known, or most gradients do not share one.

    Example:
        >>> odd_factors([4.0, 1.0, 9.0, 0.0], [1.0, 0.25, 81.0, 0.0])  # clipped by 0.5, but one
        (6.0, (2,))
    """
    factors = _factors(reduced_N, applied_N)
    if len(factors) < _FEWEST:
        return math.nan, ()
    untouched = 1.0 in factors.values()  # the same bits: the odd ones are those that were changed
    common = 1.0 if untouched else sorted(factors.values())[len(factors) // 2]
    odd = [n for n, each in factors.items() if abs(each - common) > _SAME_FACTOR * common]
    if common == 0 or (2 * len(odd) >= len(factors) and not untouched):
        return math.nan, ()
    ratios = [factors[number] / common for number in odd]
    if 0.0 in ratios:  # taken away, which says nothing of the others
        return 0.0, tuple(number for number in odd if factors[number] == 0)
    return max(ratios, key=how_far, default=1.0), tuple(odd)


NO_SLOT = DigestSlot(())
_NO_DIGESTS = StateDigests()


def _only(state: StateDigests, kinds: Collection[StateKind]) -> StateDigests:
    """Return the digests of some kinds; those of others were not read in this step."""
    kept = [d for d, kind in enumerate(state.kinds) if kind in kinds]
    return StateDigests(
        tuple(state.kinds[d] for d in kept),
        tuple(state.names[d] for d in kept),
        state.digests_D[kept],
        state.unchanged_D[kept],
    )


def _set_digest(values: dict[str, float | int], rows: Rows, digest: int | None) -> None:
    if digest is None:
        return
    column = _COLUMNS[rows.kind]
    if column in values:  # of buffers of another kind
        digest = digest_of_digests(np.array([values[column], digest], np.int64))
    values[column] = digest


@lru_cache(maxsize=256)
def _weights(number: int) -> tuple[int, ...]:
    """Return the weights of an item's slices."""
    return tuple(word_of(f"part {i}") | 1 for i in range(number))
