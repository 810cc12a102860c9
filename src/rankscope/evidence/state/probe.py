"""Digests of parameters, buffers, optimizer state and gradients, and traces of whole tensors.

And state that changes between the forward passes of a step, where nothing should move it. A few
tensors in turn are copied, a few elements of each, as each forward pass begins and as the optimizer
is called. An average of the weights that is updated in ``forward`` moves with each micro-batch, not
with each step. No digest after the step shows that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.probe import Job, MessagePart, Pending, Probe, StepEnd
from rankscope.bus.replicas import RUNNING_STATISTICS, TensorTrace
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.slot import PendingState
from rankscope.evidence.state.trace import PendingTrace, TraceMeter
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.find import FSDP2, MEGATRON
from rankscope.wrappers.fsdp2_model import ShardLookup

_TENSORS = 4  # a step, that are copied at each forward pass
_ELEMENTS = 256  # of each
_FEWEST_PASSES = 2


@dataclass(frozen=True, slots=True)
class PendingStateMessage:
    """The digests and traces of one step; they may still be on the device."""

    state: PendingState | None
    trace: PendingTrace | None
    passes: "PendingPasses | None"
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
        passes: "PassMeter | None",  # likewise at each forward pass
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
        if self._meter is None or self._meter.alone:  # an average may follow
            return
        if complete and self._updates_all:
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
        return self._meter.collect(set_aside=end.set_aside)

    def _begin(self, step: int) -> None:
        if self._meter is not None and self._step != step:
            self._step = step
            self._is_read = False
            self._meter.begin_step(step)

    def _forget(self) -> None:
        if self._meter is not None:
            self._meter.collect()
        self._step = -1

    def on_request(self, step: int, content: bytes) -> None:
        """Change the schedule of digests from a step on, as all ranks do."""
        if self._meter is not None:
            self._meter.change_schedule(step, alone=content == b"alone")

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
    """Return whether each worker holds the new parameters as soon as ``optimizer.step`` returns."""
    if optimizer is None or not wrapped.kind.updates_at_once:
        return False
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return all(id(parameter) in held for parameter in wrapped.parameters.values())


def _keeps_state_alike(wrapped: Any, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer's state is stored by parameter, and is the same on replicas."""
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


@dataclass(frozen=True, slots=True)
class PendingPasses:
    """Copies of a few tensors at moments of one step, perhaps still on the device."""

    copies: Sequence[HostCopy]  # one for each moment, as bytes
    names: Sequence[str]  # of the tensors
    frozen: Sequence[bool]  # which of them are parameters that are not trained
    ends: Sequence[int]  # where the bytes of each end

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(copy.ready for copy in self.copies)

    def read(self) -> list[tuple[str, int, bool]]:
        """Return name, number of changes, and whether it is frozen, of each that has changed."""
        moments = [np.split(copy.numpy(), self.ends[:-1]) for copy in self.copies]
        changes = [
            sum(not np.array_equal(a, b) for a, b in pairwise(each))
            for each in zip(*moments, strict=True)
        ]
        found = zip(self.names, changes, self.frozen, strict=True)
        return [(name, number, frozen) for name, number, frozen in found if number]


class _Chosen(NamedTuple):
    """A tensor that is copied in this step, and where the module holds it."""

    name: str
    held: Mapping[str, Any]
    key: str
    tensor: Tensor


class PassMeter:
    """Copies a few tensors of a model at each forward pass of a step, in turn.

    Left out are whole numbers (counters), and buffers of torch's own modules: running statistics,
    spectral norms and observers move with each forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (canonical_name(f"{prefix}.{name}" if prefix else name), held, name)
            for prefix, part in module.named_modules()
            for held, names in ((part._parameters, part._parameters), (part._buffers, _own(part)))
            for name in names
        ]
        self._turn = 0
        self._passes = self._passes_before = 0
        self._chosen: list[_Chosen] = []
        self._ends: list[int] = []
        self._copies: list[HostCopy] = []

    def see(self, *, first: bool = False) -> None:
        """Copy the tensors in turn, where a forward pass begins."""
        if first:
            self._begin()
        self._passes += 1
        self._copy()

    def see_update(self) -> None:
        """Copy them once more, where the optimizer is first called."""
        if len(self._copies) == self._passes:
            self._copy()

    def collect(self) -> PendingPasses | None:
        """Return the step's copies; None where there are too few to compare."""
        copies = self._copies
        self._copies = []
        self._passes_before = self._passes
        self._passes = 0
        if len(copies) <= _FEWEST_PASSES:
            return None
        names = [each.name for each in self._chosen]
        tensors = [each.tensor for each in self._chosen]
        frozen = [isinstance(t, nn.Parameter) and not t.requires_grad for t in tensors]
        return PendingPasses(copies, names, frozen, self._ends)

    def _begin(self) -> None:
        self._copies = []
        self._chosen = []
        self._passes = 0
        if self._passes_before < _FEWEST_PASSES or not self._places:
            return
        turn = self._turn
        self._turn = (turn + _TENSORS) % len(self._places)
        for name, held, key in (*self._places, *self._places)[turn : turn + _TENSORS]:
            tensor = held.get(key)
            if tensor is not None and _is_plain(_local(tensor)):
                self._chosen.append(_Chosen(name, held, key, tensor))
        device = self._chosen[0].tensor.device if self._chosen else None
        self._chosen = [each for each in self._chosen if each.tensor.device == device]

    def _copy(self) -> None:
        if any(
            each.held.get(each.key) is not each.tensor or not _has_memory(each.tensor)
            for each in self._chosen
        ):
            self._chosen = []  # FSDP2 holds a shard in place of a parameter, or the reverse
        if not self._chosen:
            self._copies = []
            return
        with torch.no_grad():
            parts = [
                _local(tensor).detach().view(-1)[:_ELEMENTS].view(torch.uint8)
                for _, _, _, tensor in self._chosen
            ]
            self._ends = np.cumsum([len(part) for part in parts]).tolist()
            self._copies.append(HostCopy(torch.cat(parts), own=True))


def _own(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a module's own code may move."""
    if type(module).__module__.startswith("torch.") or isinstance(module, _NormBase):
        return []
    return [name for name in module._buffers if name not in RUNNING_STATISTICS]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _has_memory(tensor: Tensor) -> bool:
    return _local(tensor).untyped_storage().size() > 0


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the first elements can be read as bytes."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (
        plain
        and tensor.is_floating_point()
        and not tensor.is_meta
        and _has_memory(tensor)
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )
