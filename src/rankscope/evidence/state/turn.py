"""The items of one step of the rotation, laid out for reading, and what the step yields of them.

Digests are sums modulo 2^64 over parts, each times an odd weight: of a tensor's slices, and of what
an optimizer keeps for each.
"""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from rankscope.bus.replicas import StateDigests, StateKind, digest_of_digests
from rankscope.evidence.state.plan import Item, Slice
from rankscope.evidence.state.readings import PendingReading, Recurring
from rankscope.evidence.state.roles import Roles
from rankscope.gradients.digest import word_of

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
_FEWEST = 3  # gradients that can tell what most have in common
_SAME_FACTOR = 0.01  # what rounding makes of one, in bfloat16 and a few elements
_MOST_LOCAL = 8  # sets of local gradients of a turn that are known


class Rows:
    """Which digests of a step are of one kind, and of which parts each is made.

    Args:
        kind: Their kind.
        items: All items of the step.
        first: Number of the first part of this kind in what is read of all.
    """

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
        self.kind, self.first = kind, first
        step = self.rows[1] - self.rows[0] if len(self.rows) > 1 else 1
        places = range(self.rows[0], self.rows[-1] + 1, step) if self.rows else range(0)
        regular = self.rows == list(places)
        self._places = slice(places.start, places.stop, step) if regular else None

    def fill(self, digests: list[int], parts: list[int]) -> int | None:
        """Fill in one digest per row from one per slice; a single one is the item's own.

        Returns:
            A digest of them all; None where there are no rows.
        """
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
        joined, start = [], 0
        for end in self.ends:
            if end - start == 1:
                joined.append(parts[start])
            else:
                pairs = zip(_weights(end - start), parts[start:end], strict=True)
                joined.append(sum(weight * part for weight, part in pairs) & _MASK)
            start = end
        return joined


class Local(NamedTuple):
    """What is read of local gradients that are shown together.

    Attributes:
        numbers: Of the slices.
        slices: What is read.
        sources: Number of the gradient that each is of.
        recurring: Their reading.
    """

    numbers: tuple[int, ...]
    slices: tuple[Slice, ...]
    sources: tuple[int, ...]
    recurring: Recurring


class Readings:
    """What is known of the readings of a turn's earlier steps.

    Attributes:
        state: Of parameters, buffers, and what the optimizer keeps.
        marks: What that was called.
        leaves: Weights of its parts, and which of them is the first of each slice.
        gradients: Of gradients, when they have been reduced, and when they are applied.
        broadcast: Of running statistics, when they have been broadcast.
        local: Of those before the reduction, by the names of their parameters.
    """

    def __init__(self) -> None:
        self.state = Recurring()
        self.marks: list[object] = []
        self.leaves: tuple[Sequence[int], Sequence[int]] = ((), ())
        self.gradients = Recurring()
        self.broadcast = Recurring()
        self.local: dict[tuple[str, ...], Local] = {}


class Turn:
    """The items that are compared in a step.

    Args:
        items: In the order in which they are told.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.kinds = tuple(kind for item in items for kind in item.kinds)
        self.names = tuple(item.name for item in items for _ in item.kinds)
        parameters = Rows(StateKind.PARAMETER, items)
        buffers = Rows(StateKind.BUFFER, items, len(parameters.slices))
        before = len(parameters.slices) + len(buffers.slices)
        statistics = Rows(StateKind.STATISTICS, items, before)
        self.tensors = (parameters, buffers, statistics)
        self.broadcast = Rows(StateKind.BROADCAST, items)
        self.optimizer = Rows(StateKind.OPTIMIZER, items)
        self.reduced = Rows(StateKind.REDUCED, items)
        self.applied = Rows(StateKind.APPLIED, items)
        self.read = [*parameters.slices, *buffers.slices, *statistics.slices]
        numbers = {part: number for number, part in enumerate(parameters.slices)}
        self.kept_of = [numbers[part] for part in self.optimizer.slices]
        """Which of the parameters it is for which the optimizer keeps something."""
        self.recurring = Readings()
        self.wanted: dict[str, list[tuple[int, Slice]]] = {}
        """Slices of reduced gradients and their numbers, by the parameter's name."""
        for number, part in enumerate(self.reduced.slices):
            self.wanted.setdefault(part.place.name, []).append((number, part))

    def local_of(self, names: tuple[str, ...]) -> Local:
        """Return what is read of the local gradients of parameters."""
        known = self.recurring.local
        local = known.get(names)
        if local is None:
            if len(known) >= _MOST_LOCAL:
                known.clear()
            read = [
                (number, part, source)
                for source, name in enumerate(names)
                for number, part in self.wanted.get(name, ())
            ]
            numbers, slices, sources = zip(*read, strict=True) if read else ((), (), ())
            local = known[names] = Local(numbers, slices, sources, Recurring())
        return local


@dataclass(slots=True)
class Seen:
    """What was read in one step; None what was not.

    Attributes:
        state: Parameters and buffers, then what the optimizer keeps.
        weights: Of the leaves of what the optimizer keeps.
        starts: Which of them is the first of each slice.
        gradients: At the two moments at which gradients are read.
        before: The last reading of gradients.
        local: What was read before the reduction, by the numbers of the slices of the reduced
            gradient; later ones count.
        reduced: Which slices of the reduced gradient are reduced at all; None if all are.
        broadcast: Running statistics right after DDP has broadcast them.
    """

    state: PendingReading | None
    weights: Sequence[int]
    starts: Sequence[int]
    gradients: dict[StateKind, PendingReading]
    before: Recurring | None
    local: dict[tuple[int, ...], PendingReading]
    reduced: Sequence[bool] | None
    broadcast: PendingReading | None = None


@dataclass(frozen=True, slots=True)
class PendingLook:
    """A worker's look at its parameters, part of which may still be read.

    Attributes:
        roles: What it has seen.
        names: Names and shapes of the parameters that are not reduced.
        left_out: What was read of them.
    """

    roles: Roles
    names: tuple[str, ...]
    left_out: PendingReading

    def read(self) -> Roles:
        """Wait for the device, and return it with the digests of what is not reduced."""
        digests, _ = self.left_out.read()
        named = zip(self.names, (digest >> 1 for digest in digests), strict=True)
        return replace(self.roles, left_out=dict(named))


class PendingState:
    """The digests of one step on their way to the host.

    Args:
        turn: What was to be read.
        seen: What was.
        layout: Digest of the plan; None without one.
        sent: Whether DDP broadcasts running statistics; else they are buffers like others.
        look: The worker's look at its parameters; None in most steps.
        tells_changed: Whether to tell which gradients were changed after the reduction.
        alike: Whether other workers hold the same gradients after the reduction; if not, their
            digests are kept back, since they would only differ.
    """

    def __init__(
        self,
        turn: Turn,
        seen: Seen,
        layout: int | None,
        *,
        sent: bool = True,
        look: "PendingLook | None" = None,
        tells_changed: bool = True,
        alike: bool = True,
    ) -> None:
        self._tells_changed, self._alike = tells_changed, alike
        self._turn, self._seen, self._layout, self._sent = turn, seen, layout, sent
        self._look = look
        self.changed: tuple[str, ...] = ()
        """Parameters whose gradient was changed otherwise than most; known once read."""

    @property
    def roles(self) -> Roles | None:
        """How each parameter takes part in the training, where the worker has looked; may wait."""
        return None if self._look is None else self._look.read()

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        seen = self._seen
        readings = [*seen.gradients.values(), *seen.local.values()]
        readings += [one for one in (seen.state, seen.broadcast) if one is not None]
        readings += [] if self._look is None else [self._look.left_out]
        return all(reading.ready for reading in readings)

    def read(self) -> tuple[StateDigests, dict[str, float | int]]:
        """Wait for the device.

        Returns:
            The digests, and LOCAL signals: ``state_layout`` and, as far as they are known,
            ``param_digest``, ``buffer_digest``, ``optimizer_digest``, ``reduced_digest``,
            ``applied_digest`` and ``applied_scale``.
        """
        turn = self._turn
        values: dict[str, float | int] = {}
        if self._layout is not None:
            values["state_layout"] = self._layout
        if turn is NOTHING:
            return _NO_DIGESTS, values
        digests, unchanged = [0] * len(turn.kinds), bytearray(len(turn.kinds))
        if self._seen.state is not None:
            self._read_state(self._seen.state, digests, values)
        self._read_gradients(digests, unchanged, values)
        digests_D = np.frombuffer(array("Q", digests), np.int64)
        state = StateDigests(turn.kinds, turn.names, digests_D, np.frombuffer(unchanged, bool))
        if not self._alike:
            state = _only(state, _NO_GRADIENTS)
        if self._seen.state is None:
            return _only(state, _GRADIENTS), values
        if self._seen.broadcast is None and turn.broadcast.slices:
            state = _only(state, _ALWAYS)
        return (state if self._sent else _with_statistics_as_buffers(state)), values

    def _read_state(
        self, reading: PendingReading, digests: list[int], values: dict[str, float | int]
    ) -> None:
        turn, seen = self._turn, self._seen
        parts, _ = reading.read()
        for rows in turn.tensors:
            own = parts[rows.first : rows.first + len(rows.slices)]
            _tell(values, rows, rows.fill(digests, own))
        if seen.broadcast is not None:
            turn.broadcast.fill(digests, seen.broadcast.read()[0])
        weighted = list(map(mul, seen.weights, parts[len(turn.read) :]))
        limits = pairwise((*seen.starts, len(weighted)))
        kept = [sum(weighted[first:last]) & _MASK for first, last in limits]
        _tell(values, turn.optimizer, turn.optimizer.fill(digests, kept))

    def _read_gradients(
        self, digests: list[int], unchanged: bytearray, values: dict[str, float | int]
    ) -> None:
        squares: dict[StateKind, float] = {}
        each: list[list[float]] = []
        for rows in (self._turn.reduced, self._turn.applied):
            reading = self._seen.gradients.get(rows.kind)
            if reading is None:
                continue
            parts, parts_squares = reading.read()
            digest = rows.fill(digests, parts)
            if self._alike:
                _tell(values, rows, digest)
            squares[rows.kind] = sum(parts_squares)
            each.append(parts_squares)
            if rows.kind is StateKind.REDUCED:
                self._tell_unchanged(unchanged, parts)
        reduced = squares.get(StateKind.REDUCED, 0.0)
        if StateKind.APPLIED in squares and 0 < reduced < math.inf:
            values["applied_scale"] = math.sqrt(squares[StateKind.APPLIED] / reduced)
            if not self._tells_changed:
                return
            factor, odd = odd_factors(*each)
            values["applied_odd"] = factor
            slices = self._turn.reduced.slices
            self.changed = tuple(dict.fromkeys(slices[number].place.name for number in odd))

    def _tell_unchanged(self, unchanged: bytearray, parts: list[int]) -> None:
        """Fill in which gradients the reduction left as they were, in all their slices."""
        seen, rows = self._seen, self._turn.reduced
        before: dict[int, int] = {}
        for numbers, reading in seen.local.items():
            before.update(zip(numbers, reading.read()[0], strict=True))
        same = [before.get(number) == part for number, part in enumerate(parts)]
        if seen.reduced is not None:
            same = [one or not reduced for one, reduced in zip(same, seen.reduced, strict=True)]
        if len(rows.rows) < len(same):
            same = [all(same[first:last]) for first, last in pairwise((0, *rows.ends))]
        rows.put(unchanged, bytes(same))


def odd_factors(
    reduced_N: Sequence[float], applied_N: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """Return which gradients were scaled otherwise than most between two moments.

    Clipping by the norm and unscaling multiply all of them by one factor. Where some were left as
    they were, that is 1; otherwise that of most.

    Args:
        reduced_N: Their squared norms right after the reduction.
        applied_N: When the optimizer was called.

    Returns:
        The factor that is furthest from that of most, over it, and whose it is not; 1 if it is that
        of all, NaN where fewer than three are known or most do not share one.

    Example:
        >>> odd_factors([4.0, 1.0, 9.0, 0.0], [1.0, 0.25, 81.0, 0.0])  # clipped by 0.5, but one
        (6.0, (2,))
    """
    pairs = enumerate(zip(reduced_N, applied_N, strict=True))
    factors = {
        number: math.sqrt(applied / reduced)
        for number, (reduced, applied) in pairs
        if 0 < reduced < math.inf and 0 <= applied < math.inf
    }
    if len(factors) < _FEWEST:
        return math.nan, ()
    untouched = 1.0 in factors.values()  # the same bits: the odd ones are those that were changed
    common = 1.0 if untouched else sorted(factors.values())[len(factors) // 2]
    odd = [n for n, each in factors.items() if abs(each - common) > _SAME_FACTOR * common]
    if common == 0 or (2 * len(odd) >= len(factors) and not untouched):
        return math.nan, ()
    ratios = [factors[number] / common for number in odd]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0), tuple(odd)


NOTHING = Turn(())
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


def _with_statistics_as_buffers(state: StateDigests) -> StateDigests:
    buffer = {StateKind.STATISTICS: StateKind.BUFFER}
    return replace(state, kinds=tuple(buffer.get(kind, kind) for kind in state.kinds))


def _tell(values: dict[str, float | int], rows: Rows, digest: int | None) -> None:
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
