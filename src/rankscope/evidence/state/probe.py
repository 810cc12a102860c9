"""The probes of state: digests, traces, what moves in forward passes, and frozen modules."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, RareProbe, Ready, StepEnd
from rankscope.bus.replicas import RUNNING_STATISTICS, StateKind
from rankscope.evidence.state import FROZEN
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.plan import held_tensor
from rankscope.evidence.state.rare import (
    make_adapter_probe,
    make_counts_probe,
    make_recomputed_probe,
    make_shards_probe,
)
from rankscope.evidence.state.trace import TraceMeter
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.calls import ModuleHook
from rankscope.wrappers.living import frozen_modules, label_of, living_modules, unheld_modules

_log = logging.getLogger("rankscope")

_TENSORS = 4  # a step, that are copied at each forward pass
_ELEMENTS = 256  # of each
_FEWEST_PASSES = 2


class ReplicaProbe(Probe):
    """Sends which workers hold the same; equal numbers hold equal parameters."""

    def __init__(self, replica: int) -> None:
        self._part = Ready(MessagePart({"replica": replica}))

    def collect(self, end: StepEnd) -> Ready:
        """Return the number."""
        return self._part


def make_probe(job: Job) -> tuple[Probe, ...]:
    """Return the probes of a model's state: digests, what moves in passes, traces, replicas."""
    wrapped = job.wrapped
    probes: list[Probe] = []
    if job.exact:
        frozen = FrozenProbe([wrapped.wrapper, wrapped.module], job.first_step)
        probes += [_meter(job), PassMeter(wrapped.module), frozen]
        others = (
            make_counts_probe(wrapped.module, job.first_step),
            make_recomputed_probe(wrapped.module, job.first_step),
            make_adapter_probe(job),
            make_shards_probe(job),
        )
        probes += [each for each in others if each is not None]
    if job.trace:
        probes.append(
            TraceMeter(
                wrapped.module,
                wrapped.parameters,
                wrapped.device,
                job.optimizer,
                every=job.every,
                leave_out=job.leave_out,
            )
        )
    if wrapped.replica is not None:
        probes.append(ReplicaProbe(wrapped.replica))
    return tuple(probes)


def _meter(job: Job) -> StateMeter:
    wrapped = job.wrapped
    lookup = wrapped.lookup()
    updates_all = _updates_all(wrapped, job.optimizer)
    of_parameters = wrapped.kind.own_optimizer or updates_all  # and the same on replicas
    return StateMeter(
        wrapped.module,
        job.optimizer if of_parameters else None,
        replicated=wrapped.replica is not None,
        reduces=wrapped.reduces(),
        broadcasts=wrapped.broadcasts(),
        left_out=wrapped.left_out(),
        lookup=lookup,
        device=wrapped.device,
        spacing=job.state_spacing,
        local_steps=job.local_steps,
        sums_by_hand=wrapped.mesh is not None,
        shards=lookup is not None and wrapped.mesh is None,
        summed=job.channel.shared_weights,
        sends_names=job.rank == 0,
        updates_all=not job.local_steps and updates_all,
        held=wrapped.held,
        by_loop=wrapped.kind.by_loop,
    )


def _updates_all(wrapped: Any, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether each worker holds the new parameters as soon as ``optimizer.step`` returns."""
    if optimizer is None or not wrapped.kind.updates_at_once:
        return False
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return all(id(parameter) in held for parameter in wrapped.parameters.values())


class _Chosen(NamedTuple):
    """A tensor that is copied in this step, and where the module holds it."""

    name: str
    held: Mapping[str, Any]
    key: str
    tensor: Tensor
    frozen: bool  # a parameter that is not trained


class PassMeter(Probe):
    """Finds state that changes between the forward passes of a step, where nothing should move it.

    A few tensors in turn are copied, a few elements of each, as each forward pass begins and as the
    optimizer is called. An average of the weights that is updated in ``forward`` moves with each
    micro-batch, not with each step. No digest after the step shows that.

    Left out are whole numbers (counters), and buffers of torch's own modules: running statistics,
    spectral norms and observers move with each forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (canonical_name(f"{prefix}.{name}" if prefix else name), held, name)
            for prefix, part in module.named_modules()
            for held, names in (
                (part._parameters, part._parameters.keys()),
                (part._buffers, _own(part)),
            )
            for name in names
        ]
        self._turn = 0
        self._passes = self._passes_before = 0
        self._chosen: list[_Chosen] = []
        self._ends: list[int] = []
        self._copies: list[HostCopy] = []

    def before_forward(self, step: int, *, first: bool) -> None:
        """Copy the tensors in turn, where a forward pass begins."""
        if first:
            self._begin()
        self._passes += 1
        self._copy()

    def before_update(self, optimizer: Any) -> None:
        """Copy them once more, where the optimizer is first called."""
        if len(self._copies) == self._passes:
            self._copy()

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._copies = []
        self._passes_before = self._passes
        self._passes = 0

    def collect(self, end: StepEnd) -> Pending | None:
        """Return the step's copies; None where there are too few to compare."""
        copies = self._copies
        self.abort()
        if len(copies) <= _FEWEST_PASSES:
            return None
        return Awaited(copies, partial(_moved, copies, self._chosen, self._ends))

    def _begin(self) -> None:
        self._copies = []
        self._chosen = []
        self._passes = 0
        if self._passes_before < _FEWEST_PASSES or not self._places:
            return
        turn = self._turn
        self._turn = (turn + _TENSORS) % len(self._places)
        for name, held, key in (*self._places, *self._places)[turn : turn + _TENSORS]:
            tensor = held_tensor(held, key)
            if tensor is not None and _is_plain(_local(tensor)):
                frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
                self._chosen.append(_Chosen(name, held, key, tensor, frozen))
        device = self._chosen[0].tensor.device if self._chosen else None
        self._chosen = [each for each in self._chosen if each.tensor.device == device]

    def _copy(self) -> None:
        if any(
            held_tensor(each.held, each.key) is not each.tensor or not _has_memory(each.tensor)
            for each in self._chosen
        ):
            self._chosen = []  # FSDP2 holds a shard in place of a parameter, or the reverse
        if not self._chosen:
            self._copies = []
            return
        with torch.no_grad():
            parts = [
                _local(each.tensor).detach().view(-1)[:_ELEMENTS].view(torch.uint8)
                for each in self._chosen
            ]
            self._ends = np.cumsum([len(part) for part in parts]).tolist()
            self._copies.append(HostCopy(torch.cat(parts), own=True))


def _moved(
    copies: Sequence[HostCopy], chosen: Sequence[_Chosen], ends: Sequence[int]
) -> MessagePart:
    """Wait for the device; return name, number of changes, and whether it is frozen, of each."""
    moments = [np.split(copy.numpy(), ends[:-1]) for copy in copies]
    found = []
    for one, values in zip(chosen, zip(*moments, strict=True), strict=True):
        changes = sum(not np.array_equal(a, b) for a, b in pairwise(values))
        if changes:
            found.append((one.name, changes, one.frozen))
    return MessagePart(names={"passes": found} if found else {})


def _own(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a module's own code may move."""
    if type(module).__module__.startswith("torch.") or isinstance(module, _NormBase):
        return []
    return [name for name in module._buffers.keys() if name not in RUNNING_STATISTICS]  # noqa: SIM118


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


READ_AT = (1, 64)
"""Steps since the start in which frozen modules are read; they are looked for in the first."""

_BEGINNING = 1 << 16  # elements of each frozen parameter
_MOST_PARAMETERS = 4096
_MOST_FOLLOWED = 16  # modules that are not frozen


class FrozenProbe(RareProbe):
    """Sends digests of modules outside of the watched model that rest, in two steps of a session.

    A module that the training holds by itself is in no wrapper, so nobody makes its copies equal.
    It rests if it is frozen; or if no optimizer has it, no gradient reaches it, and it is called: a
    copy of the model from before its broadcast, which nobody calls, may differ. The beginning of
    each parameter is digested.
    """

    def __init__(self, watched: Sequence[nn.Module], first_step: int) -> None:
        super().__init__(first_step)
        self._inside = {id(part) for model in watched for part in model.modules()}
        self._modules: list[weakref.ref[nn.Module]] | None = None
        self._hooks: list[ModuleHook] = []
        self._called: dict[int, weakref.ref[nn.Module]] = {}  # that rest though not frozen, by id

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note whether the step is due."""
        self.due = step - self._first_step in READ_AT

    def before_forward(self, step: int, *, first: bool) -> None:
        """Begin to read the modules, in the first forward pass of a step in which it is due."""
        if not first or not (self.due or step == self._first_step):
            return
        try:
            if self.due:
                self._begin()
            else:
                self._follow_calls()
        except Exception as error:  # whatever other modules of the process are
            _log.debug("frozen modules are not compared: %r", error)

    def _follow_calls(self) -> None:
        """Note the calls of modules that no optimizer holds, until they are read."""
        found = islice(unheld_modules(living_modules(self._inside)), _MOST_FOLLOWED)
        self._hooks = [ModuleHook(each, self._see_call, lambda *_: None) for each in found]

    def _see_call(self, module: nn.Module, *_: Any) -> None:
        if id(module) not in self._called:
            self._called[id(module)] = weakref.ref(module)

    def close(self) -> None:
        """Leave all modules as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def _begin(self) -> None:
        if self._modules is None:
            outside = living_modules(self._inside)
            self._modules = [weakref.ref(module) for module in frozen_modules(outside)]
        self.close()
        resting = [*self._modules, *self._called.values()]
        modules = [module for one in resting if (module := one()) is not None and _rests(module)]
        parameters: list[list[Tensor]] = [list(module.parameters()) for module in modules]
        digests = [digest_tensor(p, stop=_BEGINNING) for each in parameters for p in each]
        if digests and len(digests) <= _MOST_PARAMETERS:
            devices = dict.fromkeys(digest.device for digest in digests)  # in order
            copies = [
                HostCopy(torch.stack([one for one in digests if one.device == device]), own=True)
                for device in devices
            ]
            labels = [label_of(module) for module in modules]
            of_each = [[p.device for p in each] for each in parameters]
            self.pending = Awaited(copies, partial(_digests_by_label, labels, of_each, copies))


def _rests(module: nn.Module) -> bool:
    return all(parameter.grad is None for parameter in module.parameters())


def _digests_by_label(
    labels: Sequence[str], devices: Sequence[Sequence[torch.device]], copies: Sequence[HostCopy]
) -> MessagePart:
    """Wait for the devices, of one copy each; return a digest of each module by its label."""
    different = dict.fromkeys(device for each in devices for device in each)
    numbers = {d: iter(c.numpy().tolist()) for d, c in zip(different, copies, strict=True)}
    by_label: dict[str, list[int]] = {}
    for label, each in zip(labels, devices, strict=True):
        digests = [next(numbers[device]) for device in each]
        by_label.setdefault(label, []).append(digest_of(repr(digests).encode()))
    held = {
        label if len(found) == 1 else f"{label}, number {number}": digest
        for label, found in by_label.items()
        for number, digest in enumerate(sorted(found), 1)
    }
    return MessagePart(names={FROZEN: {StateKind.STARTED: held}})
