"""The fixed-size message that every worker sends once per step.

A message is a header of int64 (schema hash, step, flags, counts), one 8-byte slot per LOCAL
signal of the workers table, the float32 sketch, and a tail of a size that all workers agree on
for samples and micro-batches. Every worker packs and unpacks with the same :class:`Layout`;
header and size make a message of another step or another version an error, never a wrong number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.core.signals import DType, Source, Table, schema_hash, signals
from rankscope.core.step import MISSING_INT, Floats, GatheredStep, Ints
from rankscope.errors import RankscopeError

Bytes = NDArray[np.uint8]
_T = TypeVar("_T", bound=np.generic)

_HEADER = ("schema", "step", "leaving", "observed", "num_samples", "num_micro")
_LOCAL = signals(Table.WORKERS, Source.LOCAL)
_NUMPY = {DType.FLOAT: np.float64, DType.INT: np.int64, DType.BOOL: np.int64}


class Goodbye(RankscopeError):  # noqa: N818 - an event, not a failure
    """Some workers leave the channel with this step, so no later step can be gathered."""

    def __init__(self, ranks: tuple[int, ...], step: int) -> None:
        super().__init__(f"ranks {list(ranks)} stopped monitoring at step {step}")
        self.ranks = ranks
        self.step = step


class PayloadError(RankscopeError):
    """Messages that do not belong together."""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What one worker says about one step.

    Attributes:
        step: Step number.
        values: A number for each LOCAL signal that has one; all others travel as missing.
        sketch: float32 ``[k]``; None when this worker has no valid measurement.
        samples: int64 ``[B]``.
        micro_losses: float64 ``[M]``.
        micro_weights: float64 ``[M]``.
        leaving: Whether this is the worker's last message.
    """

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    sketch: NDArray[np.float32] | None = None
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    micro_losses: Floats = field(default_factory=lambda: np.empty(0))
    micro_weights: Floats = field(default_factory=lambda: np.empty(0))
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a message, the same on every worker.

    Attributes:
        sketch_width: k, or 0 in steps whose gradient is not measured.
        num_samples: Samples that fit into a message.
        num_micro: Micro-batches that fit into a message.
    """

    sketch_width: int
    num_samples: int = 64
    num_micro: int = 16

    @property
    def num_bytes(self) -> int:
        """Size of one message in bytes."""
        words = len(_HEADER) + len(_LOCAL) + self.num_samples + 2 * self.num_micro
        return 8 * words + 4 * (self.sketch_width + self.sketch_width % 2)

    def pack(self, step: WorkerStep) -> Bytes:
        """Return the message, uint8 ``[num_bytes]``.

        Samples and micro-batches beyond the layout's room stay behind; the header says how many
        there were, and :meth:`grown` makes room for the next step.
        """
        message = np.zeros(self.num_bytes, np.uint8)
        header, local, sketch, samples, micro = self._views(message[None])
        observed = step.sketch is not None and self.sketch_width > 0
        flags = (schema_hash(), step.step, step.leaving, observed)
        header[0] = (*flags, len(step.samples), len(step.micro_losses))
        for slot, signal in enumerate(_LOCAL):
            numbers = local[:, slot].view(_NUMPY[signal.dtype])
            value = step.values.get(signal.name, np.nan)
            missing = np.isnan(value) and signal.dtype is not DType.FLOAT
            numbers[0] = _missing(signal.dtype) if missing else value
        if observed:
            sketch[0, : self.sketch_width] = step.sketch
        samples[0, : len(step.samples)] = step.samples[: self.num_samples]
        micro[0, 0, : len(step.micro_losses)] = step.micro_losses[: self.num_micro]
        micro[0, 1, : len(step.micro_weights)] = step.micro_weights[: self.num_micro]
        return message

    def unpack(self, messages: Bytes, *, step: int, time: float) -> GatheredStep:
        """Return the step that W messages describe together.

        Args:
            messages: uint8 ``[W, num_bytes]`` in rank order.
            step: The step that is expected.
            time: Unix time in seconds.

        Raises:
            PayloadError: Another schema, or another step than expected.
            Goodbye: A worker left.
        """
        header, local, sketch, samples, micro = self._views(messages)
        columns = {name: header[:, slot] for slot, name in enumerate(_HEADER)}
        self._check(columns, step)
        observed = self.sketch_width > 0 and bool(columns["observed"].all())
        workers = {
            signal.name: _column(local[:, slot], signal.dtype) for slot, signal in enumerate(_LOCAL)
        }
        num_samples = np.minimum(columns["num_samples"], self.num_samples)
        num_micro = np.minimum(columns["num_micro"], self.num_micro)
        return GatheredStep(
            step=step,
            time=time,
            observed=observed,
            workers=workers,
            sketches_WK=sketch[:, : self.sketch_width].copy() if observed else None,
            samples=_rows(samples, num_samples),
            micro_losses=_rows(micro[:, 0], num_micro),
            micro_weights=_rows(micro[:, 1], num_micro),
        )

    def grown(self, messages: Bytes) -> "Layout":
        """Return a layout with room for what these messages had to leave behind.

        Every worker computes it from the same messages, so all agree without another exchange.
        """
        header = self._views(messages)[0]
        most_samples = int(header[:, _HEADER.index("num_samples")].max())
        most_micro = int(header[:, _HEADER.index("num_micro")].max())
        return replace(
            self,
            num_samples=_room(self.num_samples, most_samples),
            num_micro=_room(self.num_micro, most_micro),
        )

    def _check(self, columns: Mapping[str, Ints], step: int) -> None:
        for what, expected in (("schema", schema_hash()), ("step", step)):
            wrong = np.flatnonzero(columns[what] != expected)
            if len(wrong):
                raise PayloadError(
                    f"expected {what} {expected} from every worker, got "
                    f"{int(columns[what][wrong[0]])} from ranks {wrong.tolist()}"
                )
        leaving = np.flatnonzero(columns["leaving"])
        if len(leaving):
            raise Goodbye(tuple(leaving.tolist()), step)

    def _views(self, messages: Bytes) -> tuple[Ints, Ints, NDArray[np.float32], Ints, Floats]:
        """Return writable views ``[W, …]``: header, local, sketch, samples, micro ``[W, 2, M]``."""
        padded = self.sketch_width + self.sketch_width % 2
        sizes = (8 * len(_HEADER), 8 * len(_LOCAL), 4 * padded, 8 * self.num_samples)
        ends = np.cumsum(sizes).tolist()
        parts = np.split(messages, ends, axis=1)
        micro = parts[4].view(np.float64).reshape(len(messages), 2, self.num_micro)
        return (
            parts[0].view(np.int64),
            parts[1].view(np.int64),
            parts[2].view(np.float32),
            parts[3].view(np.int64),
            micro,
        )


def _room(now: int, needed: int) -> int:
    return now if needed <= now else 1 << (needed - 1).bit_length()


def _missing(dtype: DType) -> int:
    return MISSING_INT if dtype is DType.INT else 0


def _column(slots: Ints, dtype: DType) -> NDArray[np.generic]:
    values = slots.copy().view(_NUMPY[dtype])
    return values.astype(bool) if dtype is DType.BOOL else values


def _rows(matrix: NDArray[_T], lengths: Ints) -> tuple[NDArray[_T], ...]:
    return tuple(row[:length].copy() for row, length in zip(matrix, lengths, strict=True))
