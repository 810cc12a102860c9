"""Finds the frozen modules beside the watched model, and digests the beginning of each parameter.

A module that the training holds by itself is in no wrapper, so nobody makes its copies equal.
"""

import logging
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankscope.bus.probe import MessagePart, Probe, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.state import FROZEN
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.host import HostCopy
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.living import live_objects

_log = logging.getLogger("rankscope")

READ_AT = (1, 64)
"""Steps since the start in which the modules are read; they are looked for in the first."""

_ELEMENTS = 1 << 16  # of each parameter
_MOST_PARAMETERS = 4096
_WRAPPERS = {DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule}


class FrozenProbe(Probe):
    """Sends digests of frozen modules outside of the watched model, in two steps of a session."""

    def __init__(self, watched: Sequence[nn.Module], first_step: int) -> None:
        self._inside = {id(part) for model in watched for part in model.modules()}
        self._first_step = first_step
        self._modules: list[weakref.ref[nn.Module]] | None = None
        self._reading: _Reading | None = None

    def before_forward(self, step: int, *, first: bool) -> None:
        """Begin to read the modules, in the first forward pass of a step in which it is due."""
        if not first or step - self._first_step not in READ_AT:
            return
        try:
            self._begin()
        except Exception as error:  # whatever other modules of the process are
            _log.debug("frozen modules are not compared: %r", error)

    @torch.no_grad()
    def _begin(self) -> None:
        if self._modules is None:
            self._modules = [weakref.ref(module) for module in frozen_modules(self._inside)]
        modules = [module for one in self._modules if (module := one()) is not None]
        parameters: list[list[Tensor]] = [list(module.parameters()) for module in modules]
        digests = [digest_tensor(p, stop=_ELEMENTS) for each in parameters for p in each]
        if digests and len(digests) <= _MOST_PARAMETERS:
            devices = dict.fromkeys(digest.device for digest in digests)  # in order
            copies = [
                HostCopy(torch.stack([one for one in digests if one.device == device]), own=True)
                for device in devices
            ]
            self._reading = _Reading([label_of(module) for module in modules], parameters, copies)

    def collect(self, end: StepEnd) -> "_Reading | None":
        """Return what was read in this step."""
        reading, self._reading = self._reading, None
        return reading

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._reading = None


class _Reading:
    """Digests of modules, perhaps still on the device."""

    def __init__(
        self, labels: list[str], parameters: list[list[Tensor]], copies: list[HostCopy]
    ) -> None:
        self._labels = labels
        self._devices = [[p.device for p in each] for each in parameters]
        self._copies = copies

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return all(copy.ready for copy in self._copies)

    def read(self) -> MessagePart:
        """Wait for the device; return a digest of each module by its label."""
        devices = dict.fromkeys(device for each in self._devices for device in each)
        numbers = {d: iter(c.numpy().tolist()) for d, c in zip(devices, self._copies, strict=True)}
        by_label: dict[str, list[int]] = {}
        for label, each in zip(self._labels, self._devices, strict=True):
            digests = [next(numbers[device]) for device in each]
            by_label.setdefault(label, []).append(digest_of(repr(digests).encode()))
        held = {
            label if len(found) == 1 else f"{label}, number {number}": digest
            for label, found in by_label.items()
            for number, digest in enumerate(sorted(found), 1)
        }
        return MessagePart(names={FROZEN: {StateKind.STARTED: held}})


def frozen_modules(inside: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost living modules, not ``inside``, all of whose parameters are frozen."""
    modules: list[nn.Module] = [
        each for each in _living_modules() if id(each) not in inside and _is_frozen(each)
    ]
    parts = {id(part) for each in modules for part in each.modules() if part is not each}
    yield from (each for each in modules if id(each) not in parts)


def _living_modules() -> list[nn.Module]:
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    wrapped = [each for each in modules if not _WRAPPERS.isdisjoint(type(each).__mro__)]
    apart = {id(part) for each in wrapped for part in each.modules()}
    return [each for each in modules if id(each) not in apart]


def _is_frozen(module: nn.Module) -> bool:
    try:
        found = list(module.parameters())
    except Exception:  # such as a module that was never initialised
        return False
    return bool(found) and all(
        not p.requires_grad and type(p.data) is Tensor and not p.is_meta and p.numel()
        for p in found
    )


def label_of(module: nn.Module) -> str:
    """Return a module's class and its number of elements."""
    size = sum(parameter.numel() for parameter in module.parameters())
    return f"{type(module).__name__} ({size:,} elements)"
