"""Reads what an optimizer holds on one worker: its parameters, moments, step counters, settings."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.evidence.state.readings import PendingDigests
from rankscope.gradients.digest import word_of
from rankscope.gradients.host import HostCopy
from rankscope.gradients.kernels.bits import signed
from rankscope.wrappers.optimizers import all_of

PARAMETERS = "parameters"
COUNTER = "step"
_SETTINGS = ("betas", "eps", "momentum", "weight_decay", "alpha", "dampening", "nesterov")
_NO_SETTINGS = 8
_MOST_NAMED = 8
_UNREADABLE = word_of("cannot be read")


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer, as far as this worker holds it."""

    parameter: Tensor  # of a DTensor, its local part
    state: dict[str, Any]  # what the optimizer keeps for it; local parts likewise. Empty without.
    group: Mapping[str, Any]
    whole: Tensor  # the parameter as the optimizer has it

    @property
    def moments(self) -> dict[str, Tensor]:
        """Tensors of its state but for the step counter."""
        size = self.parameter.numel()
        return {
            key: value
            for key, value in self.state.items()
            if isinstance(value, Tensor) and key != COUNTER and value.numel() >= min(2, size)
        }

    @property
    def counter(self) -> Any:
        """Its step counter, or that of its group: a number or a tensor; None without."""
        return self.state.get(COUNTER, self.group.get(COUNTER) if self.state else None)


def held_by(optimizer: Any) -> Iterator[OptimizedParameter]:
    """Yield the parameters of which this worker holds elements, in the optimizer's order."""
    for each in all_of(optimizer):
        inner = getattr(each, "optim", each)  # of a ZeroRedundancyOptimizer: this worker's share
        states = getattr(inner, "state", {})
        for group in getattr(inner, "param_groups", ()):
            for whole in group["params"]:
                local = local_part(whole)
                if local.numel():
                    state = states.get(whole, {})
                    yield OptimizedParameter(
                        local, {k: local_part(v) for k, v in state.items()}, group, whole
                    )


def local_part(value: Any) -> Any:
    """Return the part of a DTensor that this worker holds; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


class PendingHoldings:
    """What an optimizer held at one moment; its numbers may still be on the device."""

    def __init__(self, optimizer: Any, name_of: Callable[[Tensor], str]) -> None:
        reading = PendingDigests()
        self._places: list[tuple[str, int, int]] = []  # kind, number of parameter, digest of zeros
        self._known: Counter[str] = Counter()
        self._names: list[str] = []
        self._numbers: list[float] = []
        counters: list[Tensor] = []
        settings: set[str] = set()
        for number, held in enumerate(held_by(optimizer)):
            self._names.append(name_of(held.whole))
            self._add(reading, PARAMETERS, number, held.parameter)
            for key, moment in held.moments.items():
                self._add(reading, key, number, moment)
            counter = held.counter
            if isinstance(counter, Tensor) and not counter.is_cpu:
                counters.append(counter.detach().double().reshape(()))
            elif counter is not None:
                self._numbers.append(float(counter))
            settings |= {f"{n} {held.group[n]}" for n in _SETTINGS if n in held.group}
        self._known.update({f"setting {each}": 1 for each in sorted(settings)[:_NO_SETTINGS]})
        self._counters = HostCopy(torch.stack(counters), own=True) if counters else None
        self._reading = reading.begin()

    def _add(self, reading: PendingDigests, kind: str, number: int, tensor: Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._known[f"{kind}: {dtype}"] += 1
        self._places.append((kind, number, word_of(f"{tensor.dtype} {tensor.numel()}")))
        try:
            reading.add(tensor.detach())
        except Exception:  # a tensor of an unusual kind
            reading.add_word(_UNREADABLE)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._reading.ready and (self._counters is None or self._counters.ready)

    def read(self) -> dict[str, int]:
        """Wait for the device; return integers by name.

        Of the parameters and of each moment: ``held`` (number of tensors), ``zero`` (those that
        are zero everywhere), ``bits`` (a digest of all), ``bits in any order`` (one that does not
        depend on which parameter has which) and one name for each type. ``step: lowest`` and
        ``step: highest`` are the counters; ``without: NAME`` is a parameter whose moments are
        missing or zero, where others' are not; ``setting NAME VALUE`` is a setting.
        """
        found: dict[str, int] = defaultdict(int, self._known)
        bits: dict[str, int] = defaultdict(int)
        alive: set[int] = set()
        digests, _ = self._reading.read()
        for (kind, number, zeros), digest in zip(self._places, digests, strict=True):
            found[f"{kind}: held"] += 1
            found[f"{kind}: zero"] += digest == zeros
            bits[f"{kind}: bits"] += digest * (word_of(f"part {number}") | 1)
            bits[f"{kind}: bits in any order"] += digest
            if kind != PARAMETERS and digest != zeros:
                alive.add(number)
        found |= {name: signed(total) for name, total in bits.items()}
        counters = [*self._numbers, *([] if self._counters is None else self._counters.numpy())]
        if counters:
            found[f"{COUNTER}: lowest"] = int(min(counters))
            found[f"{COUNTER}: highest"] = int(max(counters))
        without = [name for number, name in enumerate(self._names) if number not in alive]
        if alive:
            found |= {f"without: {name}": 1 for name in without[:_MOST_NAMED]}
            found["without"] = len(without)
        return dict(found)
