"""Reads the optimizer before its first update, where it is saved, and at both ends of some windows.

It finds parameters of low precision that keep their bits because rounding loses their updates. A
value keeps its bits if its update is below half of the distance to the next value. All small
parameters of 16 bits are looked at, kind by kind (such as all weights of ``RMSNorm``), in growing
windows of updates.
"""

import heapq
import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.bus.words import dtype_name
from rankscope.evidence.optimizer import KEY
from rankscope.evidence.state.readings import UNREADABLE, PendingDigests, PendingReading
from rankscope.gradients.digest import word_of
from rankscope.gradients.host import HostCopy, number_of
from rankscope.gradients.kernels.bits import signed
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.fsdp2_model import managed_places
from rankscope.wrappers.optimizers import all_of, first_of, trained_copies
from rankscope.wrappers.ranks import local_of

PARAMETERS = "parameters"
COUNTER = "step"
_SETTINGS = ("betas", "eps", "momentum", "weight_decay", "alpha", "dampening", "nesterov")
_NO_SETTINGS = 8
_MOST_NAMED = 8
_MOST_MEASURED = 32  # parameters that are measured one by one, with their moments
_MOST_ELEMENTS = 1 << 18  # of each, from its beginning
_MOST_FINE = 1 << 10  # elements of each, of which the last bits are read
_LAST_BITS = (1 << 13) - 1  # of a float32; zero in what was rounded to 16 bits


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer, as far as this worker holds it."""

    parameter: Tensor  # of a DTensor, its local part
    state: dict[str, Any]  # what the optimizer keeps for it; local parts likewise. Empty without.
    group: Mapping[str, Any]
    whole: Tensor  # the parameter as the optimizer has it
    place: str  # in the optimizer, in words

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


def held_by(optimizer: Any, *, empty: bool = False) -> Iterator[OptimizedParameter]:
    """Yield the parameters of which this worker holds elements, or those of which it has none."""
    for each in all_of(optimizer):
        inner = getattr(each, "optim", each)  # of a ZeroRedundancyOptimizer: this worker's share
        states = getattr(inner, "state", {})
        for number, group in enumerate(getattr(inner, "param_groups", ())):
            for place, whole in enumerate(group["params"]):
                local = local_of(whole)
                if empty != bool(local.numel()):
                    state = {key: local_of(each) for key, each in states.get(whole, {}).items()}
                    words = f"parameter {place} of group {number}"
                    yield OptimizedParameter(local, state, group, whole, words)


class PendingHoldings:
    """What an optimizer held at one moment; its numbers may still be on the device."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        reading = PendingDigests()
        self._places: list[tuple[str, int, int]] = []  # kind, number of parameter, digest of zeros
        self._known: Counter[str] = Counter()
        self._numbers: list[float] = []
        counters: list[Tensor] = []
        groups: dict[int, Mapping[str, Any]] = {}
        all_held = list(held_by(optimizer))
        self._names = [names.get(id(held.whole), held.place) for held in all_held]
        self._norms = Norms()
        self._finer: dict[str, list[Tensor]] = defaultdict(list)  # whether bits beyond 16 are set
        measured = _chosen(self._names)
        for number, held in enumerate(all_held):
            for key, tensor in {PARAMETERS: held.parameter.detach(), **held.moments}.items():
                self._add(reading, key, number, tensor)
                if number in measured:
                    self._finer[key] += _finer_than_half(tensor)
                    self._norms.add(f"{key} of {measured[number]}: norm", tensor)
            groups[id(held.group)] = held.group
        known = [held.counter for held in all_held if held.counter is not None]
        if not known:  # one for a whole group may be beside a parameter with an empty shard
            empty = [held.counter for held in held_by(optimizer, empty=True)]
            known = [counter for counter in empty if counter is not None]
        for counter in known:
            if isinstance(counter, Tensor) and not counter.is_cpu:
                counters.append(counter.detach().double().reshape(()))
            else:
                self._numbers.append(float(counter))
        settings = {f"{n} {g[n]}" for g in groups.values() for n in _SETTINGS if n in g}
        self._known.update({f"setting {each}": 1 for each in sorted(settings)[:_NO_SETTINGS]})
        self._counters = HostCopy(torch.stack(counters), own=True) if counters else None
        fine = [bits for some in self._finer.values() for bits in some]
        joined = torch.stack([bits.to(fine[0].device) for bits in fine]) if fine else None
        self._fine = None if joined is None else HostCopy(joined, own=True)
        self._reading = reading.begin()
        self._norms.begin()

    def _add(self, reading: PendingDigests, kind: str, number: int, tensor: Tensor) -> None:
        self._known[f"{kind}: {dtype_name(tensor.dtype)}"] += 1
        self._places.append((kind, number, word_of(f"{tensor.dtype} {tensor.numel()}")))
        try:
            reading.add(tensor.detach())
        except Exception:  # a tensor of an unusual kind
            reading.add_word(UNREADABLE)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        counted = self._counters is None or self._counters.ready
        fine = self._fine is None or self._fine.ready
        return self._reading.ready and counted and fine and self._norms.ready

    def read(self) -> dict[str, int]:
        """Wait for the device; return integers by name.

        Of the parameters and of each moment: ``held`` (number of tensors), ``zero`` (those that
        are zero everywhere), ``bits`` (a digest of all), ``bits in any order`` (one that does not
        depend on which parameter has which), ``finer`` (of some in float32, those with more bits
        than 16 can hold) and one name for each type. ``step: lowest`` and ``step: highest`` are
        the counters; ``without: NAME`` is a parameter whose moments are missing or zero, where
        others' are not; ``setting NAME VALUE`` is a setting. Of some parameters, ``KEY of NAME:
        norm`` is the norm of a moment, or its own, by its bits.
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
        if self._fine is not None:
            fine = iter(self._fine.numpy().tolist())
            for key, some in self._finer.items():
                found[f"{key}: finer"] = sum(next(fine) for _ in some)
        without = [name for number, name in enumerate(self._names) if number not in alive]
        if alive:
            found |= {f"without: {name}": 1 for name in without[:_MOST_NAMED]}
            found["without"] = len(without)
        return {**found, **self._norms.read()}


def _finer_than_half(tensor: Tensor) -> list[Tensor]:
    """Begin to read whether a float32 tensor, or its beginning, has more bits than 16 can hold."""
    if type(tensor.detach()) is not Tensor or tensor.dtype is not torch.float32:
        return []
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return []
    bits = tensor.detach().view(-1)[:_MOST_FINE].view(torch.int32)
    return [(bits & _LAST_BITS).any()]


def _chosen(names: list[str]) -> dict[int, str]:
    """Return the parameters that all sessions measure, by number, each with a name of its own."""
    alike = Counter(names)
    own = {n: name if alike[name] == 1 else f"{name} (number {n})" for n, name in enumerate(names)}
    chosen = heapq.nsmallest(_MOST_MEASURED, own, key=lambda n: zlib.crc32(own[n].encode()))
    return {number: own[number] for number in chosen}


class Norms:
    """Norms of tensors in float64, or of their beginnings, on the way to the host."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._norms: list[Tensor] = []
        self._copy: HostCopy | None = None

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Begin to measure a plain tensor; others are left out."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return
        if tensor.is_complex() or tensor.is_quantized:
            return
        if tensor.numel() > _MOST_ELEMENTS:
            if not tensor.is_contiguous():
                return
            tensor = tensor.view(-1)[:_MOST_ELEMENTS]
        self._names.append(name)
        self._norms.append(tensor.double().norm())

    def begin(self) -> None:
        """Begin the copy to the host."""
        if self._norms:
            device = self._norms[0].device
            self._copy = HostCopy(torch.stack([n.to(device) for n in self._norms]), own=True)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._copy is None or self._copy.ready

    def read(self) -> dict[str, int]:
        """Wait for the device; return the norms by name, each by its bits."""
        if self._copy is None:
            return {}
        bits = self._copy.numpy().view(np.int64).tolist()
        return dict(zip(self._names, bits, strict=True))


WINDOW = 32
"""Updates of the first window; each later one is twice as long."""

_LOW = (torch.bfloat16, torch.float16)
_LARGEST = 1 << 16  # elements
_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Place(NamedTuple):
    """Where a parameter is in the model: its name, and its kind, such as ``RMSNorm.weight``."""

    name: str
    kind: str


def places_of(module: nn.Module) -> dict[int, Place]:
    """Return the places of a model's parameters by id; under FSDP2 those of their shards."""
    shards = {place: each.tensor for place, each in managed_places(module)}
    places: dict[int, Place] = {}
    for prefix, holder in module.named_modules():
        for key, parameter in holder._parameters.items():
            held = shards.get((holder, key), parameter)
            if held is not None:
                name = f"{prefix}.{key}" if prefix else key
                kind = f"{type(holder).__name__.removeprefix('FSDP')}.{key}"
                places.setdefault(id(held), Place(name, kind))
    return places


@dataclass(slots=True)
class _Kind:
    """The parameters of a kind in one window."""

    first: str  # name
    dtype: str
    numbers: list[int] = field(default_factory=list)  # of the readings
    updates: list[Tensor] = field(default_factory=list)  # ``[3]``, see ``_largest_update``
    finer: bool = False  # whether some may move otherwise


def _read_rest(
    num_updates: int,
    kinds: Mapping[str, _Kind],
    before: PendingReading,
    after: PendingReading,
    sizes: Mapping[str, HostCopy],
) -> dict[str, int]:
    """Wait for the device; return integers by name, floats by their bits.

    The name begins with kind, type and first parameter, between bars.
    """
    digests_before, _ = before.read()
    digests_after, _ = after.read()
    found: dict[str, int] = {}
    for name, kind in kinds.items():
        at_rest = sum(digests_before[number] == digests_after[number] for number in kind.numbers)
        values = {"parameters": len(kind.numbers), "at rest": at_rest, "updates": num_updates}
        share, update, value = max(sizes[name].numpy().reshape(-1, 3).tolist())
        for what, number in (("share", share), ("update", update), ("value", value)):
            values[what] = int(np.float64(number).view(np.int64))
        label = f"{name}|{kind.dtype}|{kind.first}"
        found |= {f"{label}|{what}": number for what, number in values.items()}
    return found


class RestMeter:
    """Compares small parameters of 16 bits at both ends of a window of updates.

    A window in which a learning rate rises does not count: a warm-up may begin below the precision.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._module = module
        self._optimizer = optimizer
        self._num_updates = 0
        self._begun = 0
        self._end = 1
        self._rate = math.nan
        self._before: PendingReading | None = None
        self._ids: list[int] = []
        self._off = False

    def see_update(self) -> Awaited[dict[str, int]] | None:
        """Count an update that has ended; return the window that ends with it, if it counts."""
        self._num_updates += 1
        if self._off or self._num_updates < self._end:
            return None
        held = [one for one in held_by(self._optimizer) if one.whole.dtype in _LOW]
        held = [one for one in held if one.whole.requires_grad]
        self._off = not held
        if self._off:
            return None
        reading = PendingDigests()
        for one in held:
            if one.parameter.numel() <= _LARGEST:
                reading.add(one.parameter.detach())
            else:
                reading.add_word(0)
        now = reading.begin()
        ids = [id(one.whole) for one in held]
        rate = max(number_of(one.group.get("lr")) for one in held)
        pending = None
        if self._before is not None and ids == self._ids and not rate > self._rate:
            pending = self._compare(held, self._before, now)
        length = WINDOW if self._before is None else 2 * (self._num_updates - self._begun)
        self._before = now
        self._ids = ids
        self._rate = rate
        self._begun = self._num_updates
        self._end = self._num_updates + length
        return pending

    @torch.no_grad()
    def _compare(
        self, held: list[OptimizedParameter], before: PendingReading, after: PendingReading
    ) -> Awaited[dict[str, int]] | None:
        places = places_of(self._module)
        kinds: dict[str, _Kind] = {}
        for number, one in enumerate(held):
            place = places.get(id(one.whole))
            if place is None:
                continue
            own = _Kind(place.name, dtype_name(one.parameter.dtype))
            kind = kinds.setdefault(place.kind, own)
            kind.numbers.append(number)
            update = None if one.parameter.numel() > _LARGEST else _update_of(one)
            if update is None:
                kind.finer = True
            else:
                kind.updates.append(_largest_update(one.parameter, update))
        kinds = {name: kind for name, kind in kinds.items() if not kind.finer}
        if not kinds:
            return None
        sizes = {n: HostCopy(torch.stack(kind.updates), own=True) for n, kind in kinds.items()}
        read = partial(_read_rest, self._num_updates - self._begun, kinds, before, after, sizes)
        return Awaited([before, after, *sizes.values()], read)


def _update_of(held: OptimizedParameter) -> Tensor | None:
    """Return elements' last update by Adam's relatives or SGD with momentum; None: unknown."""
    moments = held.moments
    group = held.group
    rate = group.get("lr")
    decay = group.get("weight_decay", 0.0)
    size = held.parameter.abs().float() * decay
    if {"exp_avg", "exp_avg_sq"} <= moments.keys() <= set(_ADAM) and held.counter is not None:
        first, second = group["betas"]
        square = moments["exp_avg_sq"].float() / (1 - second**held.counter)
        mean = moments["exp_avg"].float().abs() / (1 - first**held.counter)
        adam: Tensor = (mean / (square.sqrt() + group["eps"]) + size) * rate
        return adam
    if moments.keys() == {"momentum_buffer"}:
        momentum: Tensor = (moments["momentum_buffer"].float().abs() + size) * rate
        return momentum
    return None


def _largest_update(parameter: Tensor, update: Tensor) -> Tensor:
    """Return the largest share of an update in what moves its value, with both: float32 ``[3]``.

    What moves a value is half of the distance to the next one towards zero.
    """
    value = parameter.abs().float().flatten()
    mantissa, exponent = torch.frexp(value)
    gap = torch.ldexp(torch.full_like(value, torch.finfo(parameter.dtype).eps), exponent - 1)
    half = torch.where(mantissa == 0.5, gap / 4, gap / 2).where(value > 0, torch.zeros_like(value))
    update = update.flatten()
    share = (update / half).nan_to_num(nan=0.0, posinf=math.inf)
    at = share.argmax()
    return torch.stack([share[at], update[at], value[at]])


_FIRST_MISSED = 8  # calls without a gradient, until parameters are compared; then twice as many
_MOST_COMPARED = 16  # parameters
_ELSEWHERE = "main_grad"  # where Megatron-core's wrapper accumulates gradients


class MissedGradients:
    """Counts calls in a row in which the optimizer finds no gradient, and no parameter changes.

    Some optimizers take gradients from elsewhere, and others are not known: then parameters change.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._module = module
        self._optimizer = optimizer
        self._found = True
        self._calls = 0  # in a row
        self._num_sent = 0  # of these
        self._before: PendingReading | None = None
        self._moves = False  # without gradients

    def before_update(self) -> None:
        """Look for a gradient before a call."""
        self._found = self._finds_any()

    def see_update(self) -> Awaited[dict[str, int]] | None:
        """Count a call that has ended; return the number at times, and once more when it is 0."""
        if self._moves:
            return None
        if self._found or self._finds_any():
            ended, self._calls, self._num_sent = self._num_sent > 0, 0, 0
            return Awaited([], partial(dict, calls=0, parameters=0)) if ended else None
        self._calls += 1
        if self._calls == 1:
            self._before = self._read()
        if self._before is None or self._calls < max(_FIRST_MISSED, 2 * self._num_sent):
            return None
        self._num_sent = self._calls
        held = list(self._held())
        own = {id(parameter) for parameter in self._module.parameters()}
        numbers = {
            "calls": self._calls,
            "parameters": len(held),
            "elsewhere": sum(getattr(one, _ELSEWHERE, None) is not None for one in held),
            "foreign": sum(id(one) not in own for one in held),
        }
        now = self._read()
        return Awaited([self._before, now], partial(self._unless_moved, self._before, now, numbers))

    def _held(self) -> Iterator[Tensor]:
        for each in all_of(self._optimizer):
            for group in each.param_groups:
                yield from group["params"]

    def _finds_any(self) -> bool:
        """Return whether a parameter has a gradient, or the optimizer holds none."""
        first = next(self._held(), None)
        return first is None or any(parameter.grad is not None for parameter in self._held())

    def _read(self) -> PendingReading:
        trained = [one for one in self._module.parameters() if one.requires_grad]
        reading = PendingDigests()
        for each in (list(self._held()), trained):
            for parameter in each[:: len(each) // _MOST_COMPARED + 1]:
                reading.add(local_of(parameter).detach())
        return reading.begin()

    def _unless_moved(
        self, before: PendingReading, now: PendingReading, numbers: dict[str, int]
    ) -> dict[str, int]:
        digests_before, _ = before.read()
        digests_now, _ = now.read()
        self._moves = list(digests_before) != list(digests_now)
        return {} if self._moves else numbers


class CopiesBefore:
    """Finds weights that the optimizer's copies replace in the first update of a session.

    Where copies in another type are what an optimizer trains, each weight is its copy, rounded,
    after an update. Before the first one it should be, too.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._module = module
        self._optimizer = optimizer
        own = {id(parameter) for parameter in module.parameters()}
        held = [p for each in all_of(optimizer) for g in each.param_groups for p in g["params"]]
        foreign = bool(held) and own.isdisjoint(map(id, held))
        trained = [p for p in module.parameters() if p.requires_grad]
        all_plain = all(type(p) is nn.Parameter for p in [*held, *trained])
        read = [*held, *trained] if foreign and all_plain and len(held) == len(trained) else []
        self._before = {id(parameter): first_of(parameter) for parameter in read}

    def see_update(self, names: Mapping[int, str]) -> dict[str, int]:
        """Return how many weights have copies, and which were others before; empty without."""
        before, self._before = self._before, {}
        if not before:
            return {}
        pairs = trained_copies(all_of(self._optimizer), self._module.parameters())
        if any(id(each) not in before for pair in pairs for each in pair):
            return {}
        rounded = [first_of(copy).to(weight.dtype).double() for weight, copy in pairs]
        if not all(
            torch.equal(first_of(weight), copied)
            for (weight, _), copied in zip(pairs, rounded, strict=True)
        ):
            return {}
        apart = [
            names.get(id(weight), "a parameter")
            for weight, copy in pairs
            if not torch.equal(before[id(weight)], before[id(copy)].to(weight.dtype).double())
        ]
        named = {f"apart: {name}": 1 for name in apart[:_MOST_NAMED]}
        return {"copies": len(pairs), "apart": len(apart), **named} if apart else {}


_LOOKED_FOR = 64  # steps of a session in which stale copies are looked for


class AutocastCheck:
    """Looks for copies of weights that autocast keeps from before an update.

    Autocast keeps the copy of a float32 weight until it is left. A number of our own is cast before
    a forward pass, as weights are in it, and then changed. Where a cast before the next forward
    pass gives the old number, autocast was not left in between, and weights are the old ones, too.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        plain = bool(trained) and all(type(p) is nn.Parameter for p in trained)
        kept = plain and any(p.dtype is torch.float32 for p in trained)
        self._device = trained[0].device if kept else None
        self._number: nn.Parameter | None = None
        self._updates = -1  # before the number was cast
        self._num_steps = 0

    def before_forward(self, num_updates: int) -> Awaited[dict[str, int]] | None:
        """Cast a number, and look at the one before, where there was an update in between."""
        if self._device is None or self._num_steps == _LOOKED_FOR:
            return None
        self._num_steps += 1
        number, self._number = self._number, None
        if not (torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled()):
            return None
        pending = None
        with torch.enable_grad():
            if number is not None and num_updates > self._updates:
                cast = HostCopy(torch.mm(number, number).detach().double(), own=True)
                pending = Awaited([cast], partial(_is_stale, cast))
            self._number = nn.Parameter(torch.ones(1, 1, device=self._device, dtype=torch.float32))
            torch.mm(self._number, self._number)
        self._number.data.add_(1)
        self._updates = num_updates
        return pending


def _is_stale(cast: HostCopy) -> dict[str, int]:
    return {"stale": int(cast.numpy().item() == 1)}


_PAUSE = 100  # times the host's time for a reading, until the next one: at most 1 % of the time


class OptimizerProbe(Probe):
    """Reads what the optimizer holds: before the session's first update, and where it is saved."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rest = RestMeter(job.wrapped.module, job.optimizer)
        self._missed = MissedGradients(job.wrapped.module, job.optimizer)
        self._readings: dict[StateKind, PendingHoldings | Awaited[dict[str, int]]] = {}
        self._copies: CopiesBefore | None = None
        self._stale = AutocastCheck(job.wrapped.module)
        self._stale_at = -1  # step
        self._caller: Any = None  # one of several optimizers, whose calls count
        self._begun = False
        self._num_calls = 0
        self._saved_at = -1
        self._next_time = 0.0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read what the optimizer holds before its first update.

        Not at its first call, which runs the first pass itself where it is given a closure.
        """
        if step != self._stale_at:
            self._stale_at = step
            stale = self._stale.before_forward(self._num_calls)
            if stale is not None:
                self._readings[StateKind.STALE] = stale
        if not self._begun:
            self._begun = True
            self._readings[StateKind.STARTED] = self._read()
            self._copies = CopiesBefore(self._job.wrapped.module, self._job.optimizer)

    def before_update(self, optimizer: Any) -> None:
        """Look for a gradient."""
        self._missed.before_update()

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Count the call; of several optimizers, those of the first one."""
        self._caller = self._caller or optimizer
        if optimizer is not self._caller:
            return
        self._num_calls += 1
        copies, self._copies = self._copies, None
        replaced = copies.see_update(self._names()) if copies is not None else {}
        if replaced:
            self._readings[StateKind.REPLACED] = Awaited([], partial(dict, replaced))
        rest = self._rest.see_update()
        if rest is not None:
            self._readings[StateKind.ROUNDED] = rest
        missed = self._missed.see_update()
        if missed is not None:
            self._readings[StateKind.MISSED] = missed

    def see_saved(self) -> None:
        """Read what is saved, unless it was read since the last call."""
        now = time.monotonic()
        if self._num_calls in (0, self._saved_at) or now < self._next_time:
            return
        self._saved_at = self._num_calls
        self._readings[StateKind.SAVED] = self._read()
        self._next_time = now + _PAUSE * (time.monotonic() - now)

    def _names(self) -> dict[int, str]:
        places = places_of(self._job.wrapped.module)
        return {key: canonical_name(place.name) for key, place in places.items()}

    def _read(self) -> PendingHoldings:
        return PendingHoldings(self._job.optimizer, self._names())

    def collect(self, end: StepEnd) -> Pending | None:
        """Return the readings since the last step."""
        if not self._readings:
            return None
        readings, self._readings = self._readings, {}
        return Awaited(list(readings.values()), partial(_held, readings))


def _held(readings: Mapping[StateKind, PendingHoldings | Awaited[dict[str, int]]]) -> MessagePart:
    """Wait for the device."""
    return MessagePart(names={KEY: {str(kind): one.read() for kind, one in readings.items()}})


def make_probe(job: Job) -> OptimizerProbe | None:
    """Return the probe of an optimizer; None where nothing is compared."""
    return OptimizerProbe(job) if job.exact and job.optimizer is not None else None
