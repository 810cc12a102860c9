"""The messages of all workers, and how a kind of evidence turns them into a step at the root.

Legend of shapes: W workers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import MISSING_INT
from rankscope.stats.arrays import Bools, Floats, Floats32, Ints, Ragged
from rankscope.stats.audit import AuditPart


@dataclass(frozen=True, slots=True)
class Layout:
    """How to read the workers' messages."""

    num_workers: int
    groups: tuple[str, ...] = ()  # names of the parameter groups
    section_counts: tuple[int, ...] = ()  # how many sections each group has; empty without an audit
    sketch_width: int = 0  # numbers in the sketch of the local gradient; 0 without sketches
    group_width: int = 0  # numbers in the sketch of each group; 0 without
    audit_width: int = 0  # numbers in the sketch of a section; 0 without an audit
    reduced_copies: int = 1  # how many workers hold each element of the reduced gradient
    num_products: int = 0  # inner products of the local gradient with the reduced one, 1 or 0
    # whether the training's own loop reduces: to a mean, a sum, or not at all
    by_loop: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Layout":
        """Read what :meth:`to_json` returned."""
        lists = {"groups", "section_counts"}
        values: dict[str, Any] = {n: tuple(v) if n in lists else v for n, v in given.items()}
        return cls(**values)


@dataclass(frozen=True)
class Messages:
    """One step of several workers."""

    step: int
    times_W: Floats  # Unix time in seconds at which each worker's step ended
    items_W: Ints  # digest of kinds and names of each worker's compared state
    arrays: Mapping[str, Ragged]  # all workers' arrays, by the names that evidence declares

    def __len__(self) -> int:
        return len(self.items_W)

    def __getitem__(self, name: str) -> Ragged:
        return self.arrays[name]

    @property
    def measured(self) -> Bools:
        """Which workers' messages hold a gradient ``[W]``."""
        return np.asarray(self["numbers"].lengths_R > 0)

    @cached_property
    def named(self) -> tuple[dict[str, Any], ...]:
        """What each worker has sent by name ``[W]``, empty in most steps; equal ones are shared."""
        packed = self["names"]
        if not len(packed.flat):
            return ({},) * len(self)
        known: dict[bytes, dict[str, Any]] = {b"": {}}
        found = []
        for row in packed.rows:
            text = row.tobytes()
            if text not in known:
                known[text] = json.loads(text)
            found.append(known[text])
        return tuple(found)


Columns = Mapping[str, NDArray[Any]]
"""The workers' LOCAL columns ``[W]`` by name, to be filled in place."""


class Message(Protocol):
    """One worker's step; its arrays are attributes, named as evidence declares them."""

    def __getattr__(self, name: str) -> NDArray[Any]: ...


class Combiner:
    """Turns the messages of all workers into their common step."""

    def learn(self, rank: int, message: Message) -> None:
        """Process a message on arrival, before its step is complete."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in columns of the workers; return fields of :class:`GatheredStep`."""
        return {}


class HeldValues(Combiner):
    """Records integers that workers send in a few steps, such as digests of what they hold.

    A message has them among its names, by kind of state and by name.

    ``key`` is their name there, and the beginning of their names in the record.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return them as rows of the table of digests, null on workers that have none."""
        if not any(messages.named):
            return {}
        sent_W = [names.get(self._key, {}) for names in messages.named]
        found = []
        for kind in dict.fromkeys(kind for sent in sent_W for kind in sent):
            values_W = [sent.get(kind, {}) for sent in sent_W]
            for name in dict.fromkeys(name for values in values_W for name in values):
                held_W = np.array([values.get(name, MISSING_INT) for values in values_W], np.int64)
                full_name = f"{self._key}: {name}"
                found.append(
                    StateDifference(StateKind(kind), full_name, held_W, np.zeros(len(held_W), bool))
                )
        return {"differences": tuple(found)}


def held_values(rows: Iterable[StateDifference], kind: StateKind, key: str) -> dict[str, Ints]:
    """Return the values ``[W]`` of one kind that :class:`HeldValues` has recorded, by name."""
    prefix = f"{key}: "
    return {
        row.name.removeprefix(prefix): row.digests_W
        for row in rows
        if row.kind is kind and row.name.startswith(prefix)
    }


@dataclass(frozen=True, slots=True)
class Derived:
    """Values that one kind of evidence computes from those of all workers.

    It has ``derive(gathered) -> Derived``. Gradient columns are NaN in a step that
    was not observed, sample columns where no worker named its samples.
    """

    steps: Mapping[str, float] = field(default_factory=dict)  # DERIVED columns of the steps table
    # DERIVED columns of the workers table ``[W]``
    workers: Mapping[str, Floats] = field(default_factory=dict)
    # other fields of ``rankscope.bus.step.StepReport``
    report: Mapping[str, Any] = field(default_factory=dict)


def fill(columns: Columns, ranks: Ints, values: Mapping[str, Floats]) -> None:
    """Put some workers' values into their columns; NaN is missing."""
    for name, given in values.items():
        column = columns[name]
        missing = MISSING_INT if column.dtype == np.int64 else np.nan
        column[ranks] = np.where(np.isnan(given), missing, given)


_LENGTH = 8  # bytes of the header's length


class PackedError(ValueError):
    """Bytes without the expected content."""


def pack_headed(header: Any, *parts: bytes) -> bytes:
    """Return bytes that begin with a header in JSON."""
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack_headed(packed: bytes | bytearray | memoryview) -> tuple[Any, memoryview]:
    """Return the header and the bytes after it; PackedError if there is no header."""
    content = memoryview(packed)
    at = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    try:
        return json.loads(bytes(content[_LENGTH:at])), content[at:]
    except ValueError as error:
        raise PackedError(f"these bytes have no header ({error})") from error


def pack_arrays(header: Any, arrays: Sequence[NDArray[Any]]) -> bytes:
    """Return a header and arrays of any shapes as bytes.

    Example:
        >>> header, (array,) = unpack_arrays(pack_arrays({"step": 3}, [np.eye(2)]))
        >>> header, array.tolist()
        ({'step': 3}, [[1.0, 0.0], [0.0, 1.0]])
    """
    shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
    return pack_headed([header, shapes], *(array.tobytes() for array in arrays))


def unpack_arrays(packed: bytes | bytearray | memoryview) -> tuple[Any, list[NDArray[Any]]]:
    """Return header and arrays, as views into ``packed``; PackedError if there are none."""
    content = unpack_headed(packed)
    arrays = list[NDArray[Any]]()
    at = 0
    try:
        (header, shapes), rest = content
        for name, shape in shapes:
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise PackedError("expected numbers, got an array of objects")
            array = np.frombuffer(rest, dtype, prod(shape), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
    except (ValueError, TypeError) as error:
        raise PackedError(f"these bytes hold no arrays ({error})") from error
    return header, arrays


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The inputs of one forward pass."""

    structure: Any  # arguments by position and by name, as plain JSON in which tensors are numbered
    # the tensors. Types that numpy lacks are held as integers of the same bits
    arrays: tuple[NDArray[Any], ...]
    # int64 digest of the content of each sample; empty where none was recognised
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(array.nbytes for array in self.arrays)


def pack_batch(batch: PlainBatch) -> bytes:
    """Return a batch as bytes."""
    return pack_arrays(batch.structure, (batch.samples, *batch.arrays))


def unpack_batch(packed: bytes | memoryview) -> PlainBatch:
    """Return the batch in these bytes, as views into them; PackedError if there is none."""
    structure, arrays = unpack_arrays(packed)
    if not arrays:
        raise PackedError("these bytes hold no batch")
    return PlainBatch(structure, tuple(arrays[1:]), arrays[0].astype(np.int64))


_Flat = TypeVar("_Flat", Floats, Floats32)

_ALIKE = 1e-4
"""Changes of one kind differ by less."""

NUMBERS = (
    "squares",
    "reduced_squares",
    "micro",
    "largest",
    "nonfinite",
    "carried",
    "product",
    "kept",
)
"""The parts of ``numbers``, in order; one that is absent has the size 0."""

SKETCHES = ("total", "groups", "local", "reduced")
"""The parts of ``sketches``, in order; groups that have one section each need none of their own."""


class Measured(NamedTuple):
    """The gradient parts of messages with the same sizes, unpacked. w workers."""

    values: dict[str, Floats]  # LOCAL signals ``[w]``
    group_norms_wG: Floats  # L2 norm of each group's local gradient
    sketches_wK: Floats32  # sketches of the local gradients; empty in the tier without sketches
    group_sketches_wGK: Floats32  # narrow sketches of each group's local gradient, or ``[w, G, 0]``
    audit_w: Sequence[AuditPart]  # their contributions to the audit of the reduction; empty without
    products_w: Floats  # inner product of the local gradient with the reduced one; NaN if unknown
    micro_norms_wM: Floats  # gradient norms of the micro-batches, empty when unknown
    # relative change of each group's accumulated gradient between two micro-batches, the largest of
    # the step; NaN where the worker holds nothing of it; empty when unknown
    changes_wG: Floats
    # norms of the accumulated gradient at the beginning of each backward pass after the step's
    # first; empty when unknown
    found_wB: Floats


Found = Sequence[tuple[Ints, Measured]]
"""Ranks whose messages have the same sizes, and what they have measured."""


def sizes_of(
    numbers: Mapping[str, int], sketches: Mapping[str, int], *, norm_estimated: bool
) -> list[int]:
    """Return the sizes of all parts, and whether the norm is an estimate, for the message."""
    sizes = [numbers.get(name, 0) for name in NUMBERS]
    return [*sizes, *(sketches.get(name, 0) for name in SKETCHES), int(norm_estimated)]


def measured_of(
    numbers_wN: Floats, sketches_wN: Floats32, sizes: Ints, section_counts: Sequence[int]
) -> Measured:
    """Unpack the gradient parts of step messages.

    ``numbers_wN`` and ``sketches_wN`` hold the parts of ``NUMBERS`` and ``SKETCHES``, one after the
    other, of sizes that are the same for all. ``section_counts`` is empty where groups are whole.
    """
    given = [int(size) for size in sizes]
    width = len(numbers_wN)
    part = _parts(numbers_wN, NUMBERS, given)
    sketch = _parts(sketches_wN, SKETCHES, given[len(NUMBERS) :])
    squares_wR = part["squares"]
    num_rows = given[0]
    counts = tuple(section_counts) or (1,) * num_rows
    num_groups = len(counts)
    reduced_squares_wR = part["reduced_squares"]
    if not reduced_squares_wR.size:
        reduced_squares_wR = np.full((width, num_rows), np.nan)
    audit: list[AuditPart] = []
    groups_wGK = sketch["groups"].reshape(width, num_groups, -1)
    if sketch["local"].size:
        local_wSK = sketch["local"].reshape(width, num_rows, -1)
        reduced_wSK = sketch["reduced"].reshape(width, num_rows, -1)
        if not reduced_wSK.size:
            reduced_wSK = np.full_like(local_wSK, np.nan)
        audit = list(map(AuditPart, local_wSK, reduced_wSK, reduced_squares_wR))
        if not groups_wGK.size and num_groups == num_rows:
            groups_wGK = local_wSK
    product = part["product"]
    carried = part["carried"]
    values = {
        "grad_norm": np.sqrt(squares_wR.sum(axis=1)),
        "grad_norm_estimated": np.full(width, float(given[-1])),
        "grad_max": part["largest"][:, 0],
        "grad_nonfinite": part["nonfinite"][:, 0],
        "reduced_norm": np.sqrt(reduced_squares_wR.sum(axis=1)),
        "grad_carried_over": carried[:, 0] if carried.size else np.zeros(width),
    }
    kept = part["kept"]
    num_squares = max(kept.shape[1] - num_groups, 0)
    squares_wB2 = kept[:, :num_squares].reshape(width, -1, 2)
    if kept.size:
        values |= accumulator_values(squares_wB2)
    firsts_G = np.cumsum((0, *counts[:-1]))
    return Measured(
        values=values,
        group_norms_wG=np.sqrt(np.add.reduceat(squares_wR, firsts_G, axis=1)),
        sketches_wK=sketch["total"],
        group_sketches_wGK=groups_wGK,
        audit_w=audit,
        products_w=product[:, 0] if product.size else np.full(width, np.nan),
        micro_norms_wM=np.sqrt(part["micro"]),
        changes_wG=kept[:, num_squares:],
        found_wB=np.sqrt(squares_wB2[..., 1]),
    )


def measured_in(messages: Messages, section_counts: Sequence[int]) -> Found:
    """Return what all workers have measured whose messages hold a gradient."""
    ranks = np.flatnonzero(messages.measured)
    sizes_w = messages["sizes"].take(ranks).rows
    alike: dict[bytes, list[int]] = {}
    for rank, sizes in zip(ranks.tolist(), sizes_w, strict=True):
        alike.setdefault(sizes.tobytes(), []).append(rank)
    found = []
    for content, members in alike.items():
        chosen = np.array(members)
        numbers, sketches = (messages[name].take(chosen) for name in ("numbers", "sketches"))
        given = np.frombuffer(content, np.int64)
        one = measured_of(numbers.matrix, sketches.matrix, given, section_counts)
        found.append((chosen, one))
    return found


def by_rank(found: Found, name: str) -> NDArray[Any]:
    """Return an array of all workers, in the order of their ranks."""
    if len(found) == 1:
        given: NDArray[Any] = getattr(found[0][1], name)
        return given
    joined = np.concatenate([getattr(one, name) for _, one in found])
    return joined[np.argsort(np.concatenate([ranks for ranks, _ in found]))]


def audit_of(found: Found) -> list[AuditPart]:
    """Return the parts of all workers in the audit that have one, in the order of their ranks."""
    parts: dict[int, AuditPart] = {}
    for ranks, one in found:
        parts |= dict(zip(ranks.tolist(), one.audit_w, strict=False))  # none, or all of them
    return [parts[rank] for rank in sorted(parts)]


def accumulator_values(squares_wB2: Floats) -> dict[str, Floats]:
    """Return the signals of a gradient's change between two micro-batches ``[w]``.

    ``squares_wB2`` holds squared norms at the end of a backward pass and at the beginning of the
    next, for each pair of consecutive passes.

    Example:
        >>> found = accumulator_values(np.array([[[4.0, 4.0], [9.0, 36.0]]]))
        >>> {name: value.tolist() for name, value in found.items()}  # doubled before the third
        {'accumulator_change': [0.5], 'accumulator_scale': [2.0], 'accumulator_micro': [2.0]}
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left_wB, found_wB = np.moveaxis(np.sqrt(squares_wB2), 2, 0)
        change_wB = np.nan_to_num(np.abs(found_wB - left_wB) / np.maximum(left_wB, found_wB))
        scale_wB = found_wB / left_wB
    least_w1 = (1 - _ALIKE) * change_wB.max(axis=1, keepdims=True)
    worst_w = (change_wB >= least_w1).argmax(axis=1)  # the first of equals
    each_w = np.arange(len(worst_w))
    return {
        "accumulator_change": change_wB[each_w, worst_w],
        "accumulator_scale": scale_wB[each_w, worst_w],
        "accumulator_micro": worst_w + 1.0,
    }


def _parts(flat_wN: _Flat, names: Sequence[str], sizes: Sequence[int]) -> dict[str, _Flat]:
    parts: dict[str, _Flat] = {}
    at = 0
    for name, size in zip(names, sizes, strict=False):
        parts[name] = flat_wN[:, at : at + size]
        at += size
    return parts
