"""Digests of parameters, buffers, optimizer state and gradients, and traces of whole tensors."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.bus.probe import Job, MessagePart, Pending, Probe, StepEnd
from rankscope.bus.replicas import TensorTrace
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.passes import PassMeter, PendingPasses
from rankscope.evidence.state.slot import PendingState
from rankscope.evidence.state.trace import PendingTrace, TraceMeter
from rankscope.wrappers.fsdp2_lookup import ShardLookup
from rankscope.wrappers.kinds import FSDP2, MEGATRON


@dataclass(frozen=True, slots=True)
class PendingStateMessage:
    """The digests and traces of one step; they may still be on the device.

    Names of the digested items are equal on all workers: the first one sends them once.
    """

    state: PendingState | None
    trace: PendingTrace | None
    passes: PendingPasses | None
    sent: set[int] | None  # digests of the names that the root has; None on other workers
    replica: int | None

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        parts = [part for part in (self.trace, self.state, self.passes) if part is not None]
        return all(part.ready for part in parts)

    def read(self) -> MessagePart:
        """Wait for the device."""
        part = MessagePart()
        values: dict[str, float] = {}
        arrays: dict[str, bytes] = {}
        names: dict[str, Any] = {}
        if self.replica is not None:
            values["replica"] = self.replica
        if self.state is not None:
            part.items = self._add_digests(self.state, values, arrays, names)
        if self.passes is not None and (moved := self.passes.read()):
            names["passes"] = moved
        if self.trace is not None:
            names["traced"] = _add_trace(arrays, self.trace.read())
        part.values = values
        part.arrays = arrays
        part.names = names
        return part

    def _add_digests(
        self,
        pending: PendingState,
        values: dict[str, float],
        arrays: dict[str, bytes],
        names: dict[str, Any],
    ) -> int:
        state, signals = pending.read()
        values.update(signals)
        arrays["digests_D"] = state.digests_D.tobytes()
        arrays["unchanged_D"] = state.unchanged_D.tobytes()
        if self.sent is not None and len(state.names) and state.items not in self.sent:
            self.sent.add(state.items)
            kinds = [str(kind) for kind in state.kinds]
            names["items"] = [[state.items, kinds, list(state.names)]]
        if pending.changed:
            names["changed"] = list(pending.changed)
        if pending.roles is not None:
            names["roles"] = pending.roles.read().to_json(named=self.sent is not None)
        return state.items


class StateProbe(Probe):
    """Compares one worker's state exactly.

    The new state is read as soon as the model holds it, before the script may change it; where it
    holds it later, when the step is collected.
    """

    def __init__(
        self,
        meter: StateMeter | None,  # digests state; None where nothing is compared
        tracer: TraceMeter | None,  # traces tensors; None without
        passes: PassMeter | None,  # likewise at each forward pass
        *,
        sends_names: bool,
        replica: int | None,  # equal numbers hold equal parameters; None: one owner each
        updates_all: bool,  # the model holds the new state as soon as ``optimizer.step`` returns
    ) -> None:
        self._meter = meter
        self._tracer = tracer
        self._passes = passes
        self._sent: set[int] | None = set() if sends_names else None
        self._replica = replica
        self._updates_all = updates_all
        self._step = -1
        self._is_read = False

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters whose local gradient is compared in this step."""
        return () if self._meter is None else self._meter.wanted_names

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Choose the items to read in a step, unless it has begun already."""
        self._begin(step)
        if self._tracer is not None:
            self._tracer.begin_step(step, paused=paused)

    def before_forward(self, step: int, *, first: bool) -> None:
        """Check whether DDP broadcasts buffers."""
        if first and self._meter is not None:
            self._meter.before_forward()
        if self._passes is not None:
            self._passes.see(first=first)

    def enter_module(self) -> None:
        """Read running statistics that DDP has just broadcast."""
        if self._meter is not None:
            self._meter.enter_module()

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Digest a local gradient."""
        if self._meter is not None:
            self._meter.see_local(name, gradient)

    def see_locals(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Digest several local gradients."""
        if self._meter is not None:
            self._meter.see_locals(gradients)

    def see_reduced(self) -> None:
        """Digest and trace gradients right after the reduction."""
        if self._meter is not None:
            self._meter.see_reduced()
        if self._tracer is not None:
            self._tracer.see_reduced()

    def before_update(self) -> None:
        """Digest gradients as the optimizer gets them."""
        if self._meter is not None:
            self._meter.see_applied()
        if self._passes is not None:
            self._passes.see_update()

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Read the new state, if it is complete; the last call counts."""
        if complete and self._updates_all and self._meter is not None:
            self._meter.see_state()
            self._is_read = True

    def collect(self, end: StepEnd) -> Pending:
        """Read the rest, and return all readings of the step."""
        state = self._collect_state(end)
        trace = None
        if self._tracer is not None:
            end.busy_seconds -= self._tracer.busy_seconds
            if not end.comparable:
                self._tracer.abort()
            trace, seconds = self._tracer.collect()
            end.leave_out(seconds)
        passes = None if self._passes is None else self._passes.collect()
        return PendingStateMessage(state, trace, passes, self._sent, self._replica)

    def _collect_state(self, end: StepEnd) -> PendingState | None:
        if self._meter is None:
            return None
        if not end.comparable:
            self._forget()
            return None
        self._begin(end.step)
        if not self._is_read:
            self._meter.see_state()
        return self._meter.collect()

    def _begin(self, step: int) -> None:
        if self._meter is not None and self._step != step:
            self._step = step
            self._is_read = False
            self._meter.begin_step(step)

    def _forget(self) -> None:
        if self._meter is not None:
            self._meter.collect()
        self._step = -1

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._forget()
        if self._passes is not None:
            self._passes.collect()
        if self._tracer is not None:
            self._tracer.abort()


def make_probe(job: Job) -> StateProbe:
    """Return the probe of a model's state."""
    wrapped = job.wrapped
    tracer = None
    if job.trace:
        tracer = TraceMeter(
            wrapped.module,
            wrapped.parameters,
            wrapped.device,
            job.optimizer,
            every=job.every,
            leave_out=job.leave_out,
        )
    return StateProbe(
        _meter(job) if job.exact else None,
        tracer,
        PassMeter(wrapped.module) if job.exact else None,
        sends_names=job.rank == 0,
        replica=wrapped.replica,
        updates_all=not job.local_steps and _updates_all(wrapped, job.optimizer),
    )


def _meter(job: Job) -> StateMeter:
    wrapped = job.wrapped
    ranks = dist.get_process_group_ranks(wrapped.group) if wrapped.kind is FSDP2 else []
    return StateMeter(
        wrapped.module,
        job.optimizer if _keeps_state_alike(wrapped, job.optimizer) else None,
        replicated=wrapped.replica is not None,
        reduces=wrapped.reduces(),
        broadcasts=wrapped.broadcasts(),
        left_out=wrapped.left_out(),
        lasting=ShardLookup(wrapped.wrapper, ranks) if wrapped.kind is FSDP2 else None,
        device=wrapped.device,
        spacing=job.state_spacing,
        local_steps=job.local_steps,
        sums_by_hand=wrapped.mesh is not None,
        shards=wrapped.kind is FSDP2 and wrapped.mesh is None,
        summed=job.channel.shared_weights,
    )


def _updates_all(wrapped: Any, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether each worker holds the new parameters as soon as ``optimizer.step`` returns.

    Not where DeepSpeed gathers them afterwards, nor where the known optimizer holds only a part of
    them.
    """
    if optimizer is None or not wrapped.kind.updates_at_once:
        return False
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return all(id(parameter) in held for parameter in wrapped.parameters.values())


def _keeps_state_alike(wrapped: Any, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer's state is stored by parameter, and is the same on replicas.

    DeepSpeed's is sharded, or flat; Megatron-core's, where it updates copies of the parameters.
    """
    if wrapped.kind is MEGATRON:
        return _updates_all(wrapped, optimizer)
    return bool(wrapped.kind.state_by_parameter)


def _add_trace(arrays: dict[str, bytes], trace: TensorTrace) -> dict[str, Any]:
    """Put a trace into a message, after that of the initial model; return the names."""
    parts = [part for part in (trace.initial, trace) if part is not None]
    columns: tuple[tuple[str, str, type[np.generic]], ...] = (
        ("traced_digests_N", "digests_N", np.int64),
        ("traced_norms_N", "norms_N", np.float64),
        ("traced_sketches", "sketches_NK", np.float32),
    )
    for name, field, dtype in columns:
        arrays[name] = b"".join([getattr(part, field).astype(dtype).tobytes() for part in parts])
    return {
        what: [[str(kind) for kind in part.kinds], list(part.names)]
        for what, part in (("initial", trace.initial), ("own", trace))
        if part is not None
    }
