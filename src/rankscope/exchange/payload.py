"""The fixed-size message that every worker sends once per step.

A message is one record: a header (schema hash, step, flags, counts), one slot per LOCAL signal of
the workers table, what was measured of the gradient, and a tail of a size that all workers agree
on for samples and micro-batches. Every worker packs and unpacks with the same :class:`Layout`;
header and size make a message of another step or another version an error, never a wrong number.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Ints
from rankscope.core.replicas import StateDifference, StateDigests, differences
from rankscope.core.sections import Sections
from rankscope.core.signals import DType, Source, Table, schema_hash, signals
from rankscope.core.step import MISSING_INT, GatheredStep, MeasuredGradient
from rankscope.core.trace import Trace
from rankscope.errors import RankscopeError
from rankscope.exchange.exact import sum_shares

Bytes = NDArray[np.uint8]
_T = TypeVar("_T", bound=np.generic)

MAX_DIGESTS = 32
"""Digests that a worker may send with a step."""

NO_DIGESTS = StateDigests()

_HEADER = ("schema", "step", "leaving", "observed", "num_samples", "num_micro", "items")
_LOCAL = signals(Table.WORKERS, Source.LOCAL)
_SLOTS = {
    dtype: {signal.name: slot for slot, signal in enumerate(_LOCAL) if signal.dtype is dtype}
    for dtype in (DType.FLOAT, DType.INT, DType.BOOL)
}
"""Which of a worker's slots, eight bytes each, hold the values of a type, by name."""
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
        gradient: What was measured of its gradient; None without a valid measurement.
        samples: int64 ``[B]``.
        micro: float64 ``[4, M]``: loss, loss weight, gradient norm and multiplier of each
            micro-batch.
        state: Digests of what should be equal on other workers.
        trace: This worker's tensors, where they are traced; they do not travel.
        leaving: Whether this is the worker's last message.
    """

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    gradient: MeasuredGradient | None = None
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    micro: Floats = field(default_factory=lambda: np.empty((4, 0)))
    state: StateDigests = field(default_factory=StateDigests)
    trace: Trace | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What a message holds and how much of it, the same on every worker.

    Attributes:
        sketch_width: Numbers in the sketch of the local gradient; 0 without sketches.
        groups: Names of the parameter groups.
        group_width: Numbers in the sketch of each group.
        sections: What is audited of the reduction one by one; None without an audit.
        audit_width: Numbers in the sketch of a section, which are summed over workers before the
            message is packed; 0 without an audit.
        reduced_copies: How many workers hold each element of the reduced gradient.
        gram_size: Exact inner products, W(W+1)/2 or 0.
        report_size: What a worker says of itself against all others, beyond 64 workers.
        num_products: Inner products of its gradient with the reduced one, 1 or 0.
        measured: Whether the message has room for a gradient at all.
        num_samples: Samples that fit into a message.
        num_micro: Micro-batches that fit into a message.
        num_digests: Digests that fit into a message; it does not grow.
    """

    sketch_width: int
    groups: tuple[str, ...] = ()
    group_width: int = 0
    sections: Sections | None = None
    audit_width: int = 0
    reduced_copies: int = 1
    gram_size: int = 0
    report_size: int = 0
    num_products: int = 0
    measured: bool = True
    num_samples: int = 64
    num_micro: int = 16
    num_digests: int = MAX_DIGESTS

    @property
    def num_bytes(self) -> int:
        """Size of one message in bytes."""
        return self._record.itemsize

    def pack(self, step: WorkerStep) -> Bytes:
        """Return the message, uint8 ``[num_bytes]``.

        Samples and micro-batches beyond the layout's room stay behind; the header says how many
        there were, and :meth:`grown` makes room for the next step.
        """
        packed = np.zeros(self.num_bytes, np.uint8)
        message = packed.view(self._record)[0]
        gradient, state = step.gradient if self.measured else None, step.state
        flags = (schema_hash(), step.step, step.leaving, gradient is not None)
        message["header"] = (*flags, len(step.samples), step.micro.shape[1], state.items)
        message["local"] = _local_slots(step.values)
        if gradient is not None:
            message["group_norms"] = gradient.group_norms_G
            message["sketch"] = gradient.sketch_K
            message["group_sketches"] = gradient.group_sketches_GK
            known = len(gradient.residuals) == self._num_residuals
            message["residuals"] = gradient.residuals if known else np.nan
            message["gram"] = gradient.gram
            message["report"] = gradient.report_R
            message["products"] = gradient.reduced_product
        message["samples"][: len(step.samples)] = step.samples[: self.num_samples]
        message["micro"][:, : step.micro.shape[1]] = step.micro[:, : self.num_micro]
        message["digests"][: len(state.names)] = state.digests_D
        message["unchanged"][: len(state.names)] = state.unchanged_D
        return packed

    def unpack(
        self,
        messages: Bytes,
        *,
        step: int,
        time: float,
        state: StateDigests = NO_DIGESTS,
        interval: int = 1,
        trace: Trace | None = None,
    ) -> GatheredStep:
        """Return the step that W messages describe together.

        Args:
            messages: uint8 ``[W, num_bytes]`` in rank order.
            step: The step that is expected.
            time: Unix time in seconds.
            state: This worker's own digests, which name those of all.
            interval: Sampling interval in force.
            trace: This worker's tensors, where they are traced.

        Raises:
            PayloadError: Another schema, or another step than expected.
            Goodbye: A worker left.
        """
        records_W = self._records(messages)
        header = dict(zip(_HEADER, records_W["header"].T, strict=True))
        _check(header, step)
        num_samples = np.minimum(header["num_samples"], self.num_samples)
        num_micro = np.minimum(header["num_micro"], self.num_micro)
        losses, weights, norms, scales = records_W["micro"].swapaxes(0, 1)
        observed = self.measured and bool(header["observed"].all())
        workers = _columns(records_W["local"])
        alike = bool((header["items"] == state.items).all())
        return GatheredStep(
            step=step,
            time=time,
            observed=observed,
            workers=workers,
            samples=_rows(records_W["samples"], num_samples),
            micro_losses=_rows(losses, num_micro),
            micro_weights=_rows(weights, num_micro),
            micro_norms=_rows(norms, num_micro),
            micro_scales=_rows(scales, num_micro),
            differences=_differences(state, records_W, workers["replica"]) if alike else (),
            interval=interval,
            trace=trace,
            **(self._gradients(records_W) if observed else {"sketches_WK": None}),
        )

    def grown(self, messages: Bytes) -> "Layout":
        """Return a layout with room for what these messages had to leave behind.

        Every worker computes it from the same messages, so all agree without another exchange.
        """
        header = self._records(messages)["header"]
        most_samples = int(header[:, _HEADER.index("num_samples")].max())
        most_micro = int(header[:, _HEADER.index("num_micro")].max())
        return self.with_room_for(most_samples, most_micro)

    def with_room_for(self, num_samples: int, num_micro: int) -> "Layout":
        """Return a layout with room for so many samples and micro-batches, or this one."""
        if num_samples <= self.num_samples and num_micro <= self.num_micro:
            return self
        return replace(
            self,
            num_samples=_room(self.num_samples, num_samples),
            num_micro=_room(self.num_micro, num_micro),
        )

    def without_gradient(self) -> "Layout":
        """Return the layout of a step whose gradient is not measured."""
        return replace(self, measured=False)

    def _gradients(self, records_W: NDArray[Any]) -> dict[str, Any]:
        """Return the fields of a gathered step that tell of gradients."""
        residuals_WR = records_W["residuals"].copy() if self.sections is not None else None
        return {
            "groups": self.groups,
            "group_norms_WG": records_W["group_norms"].copy(),
            "sketches_WK": records_W["sketch"].copy() if self.sketch_width else None,
            "group_sketches_WGK": records_W["group_sketches"].copy() if self.group_width else None,
            "gram_WW": sum_shares(records_W["gram"]) if self.gram_size else None,
            "total_residuals_W": None if residuals_WR is None else residuals_WR[:, 0],
            "residuals_WG": None if residuals_WR is None else residuals_WR[:, 1:],
            "reduced_copies": self.reduced_copies,
            "reports_WR": records_W["report"].copy() if self.report_size else None,
            "reduced_products_W": records_W["products"][:, 0].copy() if self.num_products else None,
        }

    def _records(self, messages: Bytes) -> NDArray[Any]:
        """Return W messages ``[W, num_bytes]`` as W records, without a copy."""
        return np.ascontiguousarray(messages).view(self._record)[:, 0]

    @property
    def _num_residuals(self) -> int:
        """Distances of the reduced gradient from the mean: in all, and by group."""
        return 0 if self.sections is None else 1 + len(self.groups)

    @property
    def _record(self) -> np.dtype[Any]:
        """The type of one message: 8-byte fields first, so that all are aligned."""
        measured = int(self.measured)
        num_groups = measured * len(self.groups)
        return _record_type(
            gram=measured * self.gram_size,
            group_norms=num_groups,
            residuals=measured * self._num_residuals,
            products=measured * self.num_products,
            samples=self.num_samples,
            micro=self.num_micro,
            digests=self.num_digests,
            sketch=measured * self.sketch_width,
            group_width=self.group_width,
            report=measured * self.report_size,
        )


@functools.lru_cache(maxsize=16)
def _record_type(**sizes: int) -> np.dtype[Any]:
    """Return the type of a message with so many numbers in each of its fields."""
    digests = (sizes["digests"],)
    return np.dtype(
        [
            ("header", np.int64, (len(_HEADER),)),
            ("local", np.int64, (len(_LOCAL),)),
            ("gram", np.float64, (sizes["gram"],)),
            ("group_norms", np.float64, (sizes["group_norms"],)),
            ("residuals", np.float64, (sizes["residuals"],)),
            ("products", np.float64, (sizes["products"],)),
            ("samples", np.int64, (sizes["samples"],)),
            ("micro", np.float64, (4, sizes["micro"])),
            ("digests", np.int64, digests),
            ("sketch", np.float32, (sizes["sketch"],)),
            ("group_sketches", np.float32, (sizes["group_norms"], sizes["group_width"])),
            ("report", np.float32, (sizes["report"],)),
            ("unchanged", np.bool_, digests),
        ]
    )


def _local_slots(values: Mapping[str, float]) -> Ints:
    """Return what a worker says in its slots, int64 ``[N]``: floats by their bits."""
    slots = np.empty(len(_LOCAL), np.int64)
    for dtype, missing in ((DType.FLOAT, np.nan), (DType.INT, MISSING_INT), (DType.BOOL, 0)):
        view: NDArray[Any] = slots.view(_NUMPY[dtype])
        for name, slot in _SLOTS[dtype].items():
            value = values.get(name, missing)
            view[slot] = value if value == value else missing  # NaN alone does not equal itself
    return slots


def _columns(slots_WN: Ints) -> dict[str, NDArray[Any]]:
    """Return all workers' values by name, each column an array of its own."""
    slots_NW = slots_WN.T.copy()
    columns: dict[str, NDArray[Any]] = {}
    for dtype, slot_of in _SLOTS.items():
        view: NDArray[Any] = slots_NW.view(_NUMPY[dtype])
        columns |= {name: view[slot].copy() for name, slot in slot_of.items()}
    for name in _SLOTS[DType.BOOL]:
        columns[name] = columns[name].astype(bool)
    return {signal.name: columns[signal.name] for signal in _LOCAL}


def _check(header: Mapping[str, Ints], step: int) -> None:
    for what, expected in (("schema", schema_hash()), ("step", step)):
        wrong_W = header[what] != expected
        if wrong_W.any():
            ranks = np.flatnonzero(wrong_W)
            raise PayloadError(
                f"expected {what} {expected} from every worker, got "
                f"{int(header[what][ranks[0]])} from ranks {ranks.tolist()}"
            )
    if header["leaving"].any():
        raise Goodbye(tuple(np.flatnonzero(header["leaving"]).tolist()), step)


def _differences(
    own: StateDigests, records_W: NDArray[Any], replicas_W: NDArray[Any]
) -> tuple[StateDifference, ...]:
    count = len(own.names)
    digests_WD, unchanged_WD = records_W["digests"][:, :count], records_W["unchanged"][:, :count]
    return differences(own, digests_WD, unchanged_WD, replicas_W)


def _room(now: int, needed: int) -> int:
    return now if needed <= now else 1 << (needed - 1).bit_length()


def _rows(matrix: NDArray[_T], lengths: Ints) -> tuple[NDArray[_T], ...]:
    return tuple(row[:length].copy() for row, length in zip(matrix, lengths.tolist(), strict=True))
