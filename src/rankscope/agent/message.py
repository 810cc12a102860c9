"""A worker's step as one flat message: a header and arrays, one after the other.

The probe fills it without statistics; whatever can be computed from it is computed by the agent.
The header says how long each array is, so that a message needs no layout to be read, and holds a
hash of the signals that it was written for: a message of another version is an error, never a
wrong number.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.frames import Content
from rankscope.core.arrays import Floats, Floats32, Ints
from rankscope.core.signals import DType, Source, Table, schema_hash, signals
from rankscope.core.step import MISSING_INT
from rankscope.errors import RankscopeError

Bytes = NDArray[np.uint8]

_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (
    ("slots", np.int64),
    ("losses_U", np.float64),
    ("weights_U", np.float64),
    ("units_M", np.int64),
    ("multipliers_M", np.float64),
    ("sums_M4", np.float64),
    ("samples_B", np.int64),
    ("digests_D", np.int64),
    ("numbers", np.float64),
    ("sizes", np.int64),
    ("traced_digests_N", np.int64),
    ("traced_norms_N", np.float64),
    ("sketches", np.float32),
    ("traced_sketches", np.float32),
    ("unchanged_D", np.uint8),
    ("names", np.uint8),
)
_HEADER = struct.Struct(f"<qqdq{len(_ARRAYS)}I")  # schema, step, time, items
_LOCAL = signals(Table.WORKERS, Source.LOCAL)
_MISSING: dict[DType, float] = {DType.FLOAT: math.nan, DType.INT: MISSING_INT, DType.BOOL: 0}
_NO_VALUES = [_MISSING[signal.dtype] for signal in _LOCAL]
_SLOTS = struct.Struct("=" + "".join("d" if s.dtype is DType.FLOAT else "q" for s in _LOCAL))
_PARTS = {name: (place, np.dtype(dtype).itemsize) for place, (name, dtype) in enumerate(_ARRAYS)}
_PLACES = {signal.name: (place, signal.dtype) for place, signal in enumerate(_LOCAL)}


def _no_ints() -> Ints:
    return np.empty(0, np.int64)


def _no_floats() -> Floats:
    return np.empty(0)


def _no_singles() -> Floats32:
    return np.empty(0, np.float32)


def _no_bytes() -> Bytes:
    return np.empty(0, np.uint8)


class MessageError(RankscopeError):
    """A message that cannot be read."""


@dataclass(slots=True)
class StepMessage:
    """What one worker says about one step, as it was measured.

    Attributes:
        step: Step number.
        time: Unix time in seconds at which the step ended.
        items: Digest of kinds and names of what ``digests_D`` are of.
        slots: A LOCAL signal each, see :func:`pack_values`: floats by their bits.
        losses_U: Losses of all micro-batches, one after the other, in units: see ``units_M``.
        weights_U: Label tokens behind each, NaN if unknown.
        units_M: How many units each micro-batch has.
        multipliers_M: What each loss was multiplied by before backward; empty if unknown.
        sums_M4: Of losses that are sums over label tokens, all of them: how many tokens, what the
            sum was divided by, their mean, and what that was multiplied by before backward.
        samples_B: Ids or digests of the samples.
        digests_D: Digests of what should be equal on other workers.
        unchanged_D: For reduced gradients: whether the reduction left the local bits as they were.
        numbers: What was measured of the gradient, see :mod:`rankscope.core.measured`; empty
            without a valid measurement.
        sizes: How ``numbers`` and ``sketches`` are made up.
        sketches: Sketches of the gradient.
        traced_digests_N: Digests of traced tensors, and beside them norms and sketches.
        names: What ``digests_D`` and traced tensors are called, as JSON, where that is new.
    """

    step: int
    time: float = 0.0
    items: int = 0
    slots: Ints = field(default_factory=_no_ints)
    losses_U: Floats = field(default_factory=_no_floats)
    weights_U: Floats = field(default_factory=_no_floats)
    units_M: Ints = field(default_factory=_no_ints)
    multipliers_M: Floats = field(default_factory=_no_floats)
    sums_M4: Floats = field(default_factory=_no_floats)
    samples_B: Ints = field(default_factory=_no_ints)
    digests_D: Ints = field(default_factory=_no_ints)
    unchanged_D: Bytes = field(default_factory=_no_bytes)
    numbers: Floats = field(default_factory=_no_floats)
    sizes: Ints = field(default_factory=_no_ints)
    sketches: Floats32 = field(default_factory=_no_singles)
    traced_digests_N: Ints = field(default_factory=_no_ints)
    traced_norms_N: Floats = field(default_factory=_no_floats)
    traced_sketches: Floats32 = field(default_factory=_no_singles)
    names: Bytes = field(default_factory=_no_bytes)

    @property
    def measured(self) -> bool:
        """Whether it holds a gradient."""
        return len(self.numbers) > 0

    def without_gradient(self) -> None:
        """Leave the gradient out, where there is no room for it."""
        for name, dtype in _ARRAYS:
            if name in ("numbers", "sizes", "sketches"):
                setattr(self, name, np.empty(0, dtype))

    def pack(self) -> bytes:
        """Return the message's bytes."""
        parts = {n: np.asarray(getattr(self, n), dtype).tobytes() for n, dtype in _ARRAYS}
        return b"".join(pack_step(self.step, self.time, self.items, parts))

    @classmethod
    def unpack(cls, content: bytes) -> "StepMessage":
        """Read a message; its arrays look into ``content``.

        Raises:
            MessageError: It is of another version, or cut short.
        """
        if len(content) < _HEADER.size:
            raise MessageError(f"expected a step, got {len(content)} bytes")
        schema, step, time, items, *lengths = _HEADER.unpack_from(content)
        if schema != schema_hash():
            raise MessageError(
                f"expected a step of schema {schema_hash()}, got one of {schema}: two versions of "
                "rankscope are at work; install the same one for all ranks"
            )
        arrays, at = {}, _HEADER.size
        for (name, dtype), length in zip(_ARRAYS, lengths, strict=True):
            size = length * np.dtype(dtype).itemsize
            if at + size > len(content):
                raise MessageError(f"step {step} is cut short at {name}")
            arrays[name] = np.frombuffer(content, dtype, length, at)
            at += size
        return cls(step=step, time=time, items=items, **arrays)


def pack_step(step: int, time: float, items: int, parts: Mapping[str, Content]) -> list[Content]:
    """Return the bytes of a message, in pieces that belong one behind the other.

    Args:
        step: See :class:`StepMessage`, also for all others.
        time: Unix time.
        items: Digest of kinds and names.
        parts: The bytes of its arrays; one that is empty may be absent.
    """
    lengths = [0] * len(_ARRAYS)
    found: list[Content] = [b""] * len(_ARRAYS)
    for name, part in parts.items():
        place, size = _PARTS[name]
        lengths[place], found[place] = len(part) // size, part
    return [
        _HEADER.pack(schema_hash(), step, time, items, *lengths),
        *[part for part in found if part],
    ]


def pack_values(values: Mapping[str, float]) -> bytes:
    """Return a worker's LOCAL signals, 8 bytes each; one that is absent or NaN is missing."""
    slots = _NO_VALUES.copy()
    for name, value in values.items():
        if value == value:
            place, dtype = _PLACES[name]
            slots[place] = value if dtype is DType.FLOAT else int(value)
    return _SLOTS.pack(*slots)


def columns_of(slots_W: Sequence[Ints]) -> dict[str, NDArray[Any]]:
    """Return all workers' values ``[W]`` by name, each column an array of its own."""
    slots_NW = np.stack(slots_W).T.copy()
    columns: dict[str, NDArray[Any]] = {}
    for name, (place, dtype) in _PLACES.items():
        column = slots_NW[place]
        if dtype is DType.FLOAT:
            column = column.view(np.float64)
        elif dtype is DType.BOOL:
            column = column.astype(bool)
        columns[name] = column.copy()
    return columns
