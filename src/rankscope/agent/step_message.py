"""A worker's step as one flat message, and the report of a step for the training.

A step is a header and arrays, one after the other. The training process computes no statistics for
it; the agent does. Its arrays are those that each kind of evidence declares, and two of its own: a
number for each LOCAL column (``slots``), and names as JSON (``names``). The header has the length
of each array, and a hash of all declarations: a message of another version is an error, never a
wrong number.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.evidence import Array, DType, Source, Table
from rankscope.bus.probe import Content
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.shares import pack_arrays, unpack_arrays
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.errors import RankscopeError
from rankscope.evidence import EVIDENCE, columns_of, schema_hash
from rankscope.record.states import put_back, take_out
from rankscope.stats.arrays import MISSING_INT, Ints

ARRAYS = (
    Array("slots", np.int64),
    *(array for each in EVIDENCE for array in each.arrays),
    Array("names", np.uint8),
)

_HEADER = struct.Struct(f"<qqdq{len(ARRAYS)}I")  # schema, step, time, items
_LOCAL = columns_of(Table.WORKERS, Source.LOCAL)
_MISSING: dict[DType, float] = {DType.FLOAT: math.nan, DType.INT: MISSING_INT, DType.BOOL: 0}
_NO_VALUES = [_MISSING[column.dtype] for column in _LOCAL]
_SLOTS = struct.Struct("=" + "".join("d" if c.dtype is DType.FLOAT else "q" for c in _LOCAL))
_SIZES = {array.name: np.dtype(array.dtype).itemsize for array in ARRAYS}
_PLACES = {array.name: place for place, array in enumerate(ARRAYS)}
_COLUMNS = {column.name: (place, column.dtype) for place, column in enumerate(_LOCAL)}
_EMPTY = {array.name: np.empty(0, array.dtype) for array in ARRAYS}


class MessageError(RankscopeError):
    """A message that cannot be read."""


def check_schema(schema: int) -> None:
    """Raise a MessageError unless a step is of this version's schema."""
    if schema != schema_hash():
        raise MessageError(
            f"expected a step of schema {schema_hash()}, got one of {schema}: two versions of "
            "rankscope are at work; install the same one for all ranks"
        )


class StepMessage:
    """One worker's measured step; its arrays are attributes, by their declared names.

    ``items`` is a digest of kinds and names of the items of ``digests_D``; absent arrays are empty.
    """

    def __init__(self, step: int, time: float = 0.0, items: int = 0, **arrays: Any) -> None:
        self.step = step
        self.time = time
        self.items = items
        for name, empty in _EMPTY.items():
            setattr(self, name, arrays.get(name, empty))

    def __getattr__(self, name: str) -> NDArray[Any]:
        raise AttributeError(f"a step has no array {name!r}")

    @property
    def measured(self) -> bool:
        """Whether it holds a gradient."""
        return len(self.numbers) > 0

    def replace(self, **arrays: Any) -> "StepMessage":
        """Return the same message with other arrays."""
        own = {name: getattr(self, name) for name in _EMPTY}
        return StepMessage(self.step, self.time, self.items, **{**own, **arrays})

    def without_bulk(self) -> None:
        """Drop the large arrays, where there is no room for them."""
        for array in ARRAYS:
            if array.bulk:
                setattr(self, array.name, _EMPTY[array.name])

    def pack(self) -> bytes:
        """Return the message's bytes."""
        parts = {a.name: np.asarray(getattr(self, a.name), a.dtype).tobytes() for a in ARRAYS}
        return b"".join(pack_step(self.step, self.time, self.items, parts))

    @classmethod
    def unpack(cls, content: bytes) -> "StepMessage":
        """Read a message; its arrays look into ``content``."""
        if len(content) < _HEADER.size:
            raise MessageError(f"expected a step, got {len(content)} bytes")
        schema, step, time, items, *lengths = _HEADER.unpack_from(content)
        check_schema(schema)
        arrays = {}
        at = _HEADER.size
        for (name, dtype, _), length in zip(ARRAYS, lengths, strict=True):
            size = length * _SIZES[name]
            if at + size > len(content):
                raise MessageError(f"step {step} is cut short at {name}")
            arrays[name] = np.frombuffer(content, dtype, length, at)
            at += size
        return cls(step, time, items, **arrays)


def pack_step(step: int, time: float, items: int, parts: Mapping[str, Content]) -> list[Content]:
    """Return the bytes of a :class:`StepMessage`, in pieces, from those of its arrays."""
    lengths = [0] * len(ARRAYS)
    found: list[Content] = [b""] * len(ARRAYS)
    for name, part in parts.items():
        place = _PLACES[name]
        lengths[place] = len(part) // _SIZES[name]
        found[place] = part
    header = _HEADER.pack(schema_hash(), step, time, items, *lengths)
    return [header, *[part for part in found if part]]


def pack_values(values: Mapping[str, float]) -> bytes:
    """Pack a worker's LOCAL columns, 8 bytes each; an absent one or NaN is missing."""
    slots = _NO_VALUES.copy()
    for name, value in values.items():
        if value == value:
            place, dtype = _COLUMNS[name]
            slots[place] = value if dtype is DType.FLOAT else int(value)
    return _SLOTS.pack(*slots)


def unpack_columns(slots_WN: Ints) -> dict[str, NDArray[Any]]:
    """Return all workers' values ``[W]`` by name, each column an array of its own."""
    slots_NW = slots_WN.T.copy()
    columns: dict[str, NDArray[Any]] = {}
    for name, (place, dtype) in _COLUMNS.items():
        column = slots_NW[place]
        if dtype is DType.FLOAT:
            column = column.view(np.float64)
        elif dtype is DType.BOOL:
            column = column.astype(bool)
        columns[name] = column.copy()
    return columns


_NUMBERS = {each.name: number for number, each in enumerate(EVIDENCE)}


def tag(name: str, content: Content) -> bytes:
    """Return a payload of one kind of evidence, with the number of the kind in front."""
    return bytes([_NUMBERS[name]]) + content


def untag(payload: bytes) -> tuple[str, bytes]:
    """Return the kind of evidence of a payload, and its content."""
    if not payload or payload[0] >= len(EVIDENCE):
        raise MessageError(f"expected a kind of evidence, got {payload[:1]!r}")
    return EVIDENCE[payload[0]].name, payload[1:]


_LEFT_OUT = {"sketches_WK", "group_sketches_WGK", "consensus", "trace", "differences"}
_TUPLES = {"samples", "micro_losses", "micro_weights", "micro_norms", "micro_scales", "groups"}


def pack_report(report: StepReport) -> bytes:
    """Return a report's bytes, without sketches, traces and the consensus."""
    gathered = report.gathered
    kept = {f.name: getattr(gathered, f.name) for f in fields(gathered) if f.name not in _LEFT_OUT}
    arrays: list[NDArray[Any]] = []
    state = {
        "gathered": kept,
        "differences": [
            [str(one.kind), one.name, one.digests_W, one.unchanged_W]
            for one in gathered.differences
        ],
        "values": dict(report.values),
        "derived": dict(report.derived),
        "cosines": report.cosines_WW,
        "group_cosines": report.group_cosine_rest_WG,
    }
    return pack_arrays(take_out(state, arrays), arrays)


def unpack_report(content: bytes) -> StepReport:
    """Return the report that :func:`pack_report` has packed."""
    try:
        tree, arrays = unpack_arrays(bytearray(content))  # users may write into them
        packed: dict[str, Any] = put_back(tree, arrays.__getitem__)
        kept: dict[str, Any] = {
            n: tuple(v) if n in _TUPLES else v for n, v in packed["gathered"].items()
        }
        gathered = GatheredStep(sketches_WK=None, **kept)
        differences = tuple(
            StateDifference(StateKind(kind), name, digests_W, unchanged_W)
            for kind, name, digests_W, unchanged_W in packed["differences"]
        )
        return StepReport(
            replace(gathered, differences=differences),
            packed["values"],
            packed["derived"],
            packed["cosines"],
            packed["group_cosines"],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise RankscopeError(f"a step's report cannot be read ({error!r})") from error
