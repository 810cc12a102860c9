"""How one step's messages become one gathered step: among all workers, or at rank 0.

Up to ``MAX_PAIRED`` workers everybody gets every message, sketches included, and so every pair.
Beyond, that would cost each worker bytes in proportion to W. Then sketches are summed over workers
instead, each worker compares itself with the sum, and only small messages go to rank 0.
"""

import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rankscope.core.arrays import Floats, Ints
from rankscope.core.audit import AuditPart, residuals
from rankscope.core.audit import contribution as contribution_to_audit
from rankscope.core.consensus import (
    Consensus,
    consensus_of,
    contribution,
    groups_in_turn,
)
from rankscope.core.scale import undo_common_scale
from rankscope.core.signals import schema_hash
from rankscope.core.step import GatheredStep, MeasuredGradient
from rankscope.exchange.channel import Bytes, Channel
from rankscope.exchange.payload import Goodbye, Layout, PayloadError, WorkerStep

MAX_PAIRED = 64
"""Workers up to which every pair is compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker knows of a step after the exchange.

    Attributes:
        step: Step number.
        observed: Whether all workers measured their gradients.
        overhead_seconds: What the monitor took from training: each worker's, or the largest.
        step_seconds: What the step took: each worker's, or the largest.
        gathered: The step, where this worker has it.
    """

    step: int
    observed: bool
    overhead_seconds: Floats
    step_seconds: Floats
    gathered: GatheredStep | None


class Gathering(Protocol):
    """Exchanges one step at a time, in order, on all workers alike."""

    def exchange(self, message: WorkerStep, interval: int) -> Outcome:
        """Give this worker's message and return what came of the step; blocks.

        Args:
            message: This worker's step.
            interval: Sampling interval in force, the same on every worker.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
            PayloadError: The workers' messages do not belong together.
            Goodbye: A worker left.
        """


class FlatGathering:
    """Every worker gets every message.

    Args:
        channel: The channel to gather on.
        layout: What a message holds.
    """

    def __init__(self, channel: Channel, layout: Layout) -> None:
        self._channel = channel
        self._layout = layout

    def exchange(self, message: WorkerStep, interval: int) -> Outcome:
        """Give this worker's message and return the step of all."""
        layout = _layout_of(self._layout, message.step, interval)
        if layout.measured and layout.sections is not None:
            # also without a gradient: all take part, or none
            self._channel.meet()
            message = replace(message, gradient=_audited(self._channel, layout, message.gradient))
        messages = self._channel.gather(layout.pack(message))
        grown = layout.grown(messages)
        if grown is not layout:
            self._layout = replace(grown, measured=True)
        gathered = undo_common_scale(_unpacked(layout, messages, message, interval))
        return Outcome(
            step=message.step,
            observed=gathered.observed,
            overhead_seconds=gathered.workers["overhead_seconds"],
            step_seconds=gathered.workers["step_seconds"],
            gathered=gathered,
        )


class RootGathering:
    """Sketches are summed over workers; rank 0 gets the messages, which hold none.

    Args:
        channel: The channel to sum and gather on.
        layout: What a message would hold among few workers; its sketches are summed instead.
    """

    def __init__(self, channel: Channel, layout: Layout) -> None:
        self._channel = channel
        self._num_groups = len(layout.groups) if layout.group_width else 0
        self._widths = (layout.sketch_width, layout.group_width)
        num_reported = 3 + len(groups_in_turn(0, self._num_groups)) if layout.sketch_width else 0
        self._layout = replace(
            layout,
            sketch_width=0,
            group_width=0,
            report_size=num_reported,
            num_samples=0,  # rank 0 pays W times for room; it grows before a message is packed
            num_micro=0,
        )

    def exchange(self, message: WorkerStep, interval: int) -> Outcome:
        """Give this worker's message; only rank 0 gets the step."""
        layout = _layout_of(self._layout, message.step, interval)
        self._channel.meet()
        most = self._agree(message)
        self._layout = self._layout.with_room_for(most["num_samples"], most["num_micro"])
        layout = layout.with_room_for(most["num_samples"], most["num_micro"])
        observed = layout.measured and not most["unmeasured"]
        consensus, turn = None, groups_in_turn(message.step // interval, self._num_groups)
        gradient = message.gradient if observed else None
        if gradient is not None and layout.report_size:
            consensus = self._compare(gradient, turn)
        if gradient is not None:
            gradient = _audited(self._channel, layout, gradient)
        if gradient is not None:
            gradient = _without_sketches(gradient, consensus)
        packed = layout.pack(replace(message, gradient=gradient))
        messages = self._channel.gather_to_root(packed)
        gathered = None
        if messages is not None:
            gathered = _unpacked(layout, messages, message, interval)
            gathered = undo_common_scale(
                replace(gathered, consensus=consensus, groups_in_turn=turn)
            )
        seconds = np.array([most["overhead_ns"], most["step_ns"]]) / 1e9
        return Outcome(message.step, observed, seconds[:1], seconds[1:], gathered)

    def _agree(self, message: WorkerStep) -> dict[str, int]:
        """Return the largest of some numbers over workers; check that all are at one step."""
        most = {
            "schema": schema_hash(),
            "other_schema": -schema_hash(),
            "step": message.step,
            "other_step": -message.step,
            "leaving": (self._channel.rank + 1) * message.leaving,
            "unmeasured": int(message.gradient is None),
            "num_samples": len(message.samples),
            "num_micro": message.micro.shape[1],
            "overhead_ns": _nanoseconds(message.values.get("overhead_seconds")),
            "step_ns": _nanoseconds(message.values.get("step_seconds")),
        }
        values = self._channel.reduce_max(np.array(list(most.values()), np.int64))
        most = dict(zip(most, values.tolist(), strict=True))
        for what in ("schema", "step"):
            if most[what] != -most[f"other_{what}"]:
                raise PayloadError(
                    f"expected one {what} on every worker, got {-most[f'other_{what}']} to "
                    f"{most[what]}"
                )
        if most["leaving"]:
            raise Goodbye((most["leaving"] - 1,), message.step)
        return most

    def _compare(self, gradient: MeasuredGradient, turn: Ints) -> Consensus:
        groups = gradient.group_sketches_GK
        groups = groups[turn] if self._num_groups else np.empty((0, 0), np.float32)
        total = self._channel.reduce_sum(contribution(gradient.sketch_K, groups))
        return consensus_of(total, gradient.sketch_K, groups)


def choose_gathering(channel: Channel, layout: Layout) -> Gathering:
    """Return the gathering that fits the number of workers."""
    if channel.num_workers <= MAX_PAIRED:
        return FlatGathering(channel, layout)
    return RootGathering(channel, layout)


def _layout_of(layout: Layout, step: int, interval: int) -> Layout:
    return layout if step % interval == 0 else layout.without_gradient()


def _unpacked(layout: Layout, messages: Bytes, message: WorkerStep, interval: int) -> GatheredStep:
    """Return the step of all messages; what a message does not hold is this worker's own."""
    return layout.unpack(
        messages,
        step=message.step,
        time=time.time(),
        state=message.state,
        interval=interval,
        trace=message.trace,
    )


def _audited(
    channel: Channel, layout: Layout, gradient: MeasuredGradient | None
) -> MeasuredGradient | None:
    """Compare what the reduction returned with the mean of all workers' gradients; blocks.

    A worker that does not know its own contributes what makes the result unknown to all.
    """
    sections = layout.sections
    if sections is None:
        return gradient
    part = None if gradient is None else gradient.audit
    if part is None:
        part = AuditPart.unknown(len(sections), layout.audit_width)
    width, copies = channel.num_workers, layout.reduced_copies
    total = channel.reduce_sum(contribution_to_audit(part, width, copies))
    if gradient is None:
        return None
    return replace(gradient, audit=None, residuals=residuals(total, part, sections, width, copies))


def _without_sketches(gradient: MeasuredGradient, consensus: Consensus | None) -> MeasuredGradient:
    empty = np.empty(0, np.float32)
    return replace(
        gradient,
        sketch_K=empty,
        group_sketches_GK=np.empty((len(gradient.group_norms_G), 0), np.float32),
        report_R=empty if consensus is None else consensus.report(),
    )


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None or not np.isfinite(seconds) else int(seconds * 1e9)
