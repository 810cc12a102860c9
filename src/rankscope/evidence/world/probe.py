"""Publishes what a group of ranks reduces, and reads what the others of the job have published.

The training's own store carries it. The first rank of each group writes one key, and reads those of
the others at steps 0, 1, 2, 4, 8, …; no rank waits for another, nor has to be watched at all.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rankscope.bus.probe import Channel, Job, MessagePart, Probe, is_power
from rankscope.bus.words import dtype_name
from rankscope.evidence.world.director import ELEMENTS, MOST_UNITS, Unit, UnitsOfJob
from rankscope.gradients.host import HostCopy
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.fsdp2_mesh import outer_axes
from rankscope.wrappers.fsdp2_model import parameters_by_mesh
from rankscope.wrappers.labels import own
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.rendezvous import default_store
from rankscope.wrappers.wrapped import Wrapped

_log = logging.getLogger("rankscope")

NAME = "world"

_MOST_PARAMETERS = 64
_LAST_READING = 64  # steps since the run began
_LAST_LOOK = 1 << 14

_sessions: Counter[int] = Counter()  # of this process by model: ranks that train one count alike


class WorldProbe(Probe):
    """Publishes the units that this rank is the first of; all calls come on the training thread."""

    def __init__(
        self,
        job: Job,
        units: Sequence[tuple[Unit, Sequence[Tensor]]],  # with the parameters that are read
        reference: Sequence[Tensor],  # the main unit's parameters, where another one's are read
        store: Any,  # the training's, in a part of its own
    ) -> None:
        self._optimizer = job.optimizer
        self._channel: Channel = job.channel
        self._first_step = job.first_step
        self._units = units
        self._store = store
        self._reference = reference
        self._gradients: dict[str, list[HostCopy]] = {}
        self._pending: dict[int, list[HostCopy]] = {}
        self._numbers: list[int] = []
        self._published: dict[int, bytes] = {}
        self._others: dict[str, bytes] = {}
        self._age = -1

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read some elements of the parameters before the step changes them."""
        age = step - self._first_step
        if age == self._age or not self._units:
            return
        self._age = age
        if is_power(age) and age <= _LAST_READING:
            self._try(self._read_parameters)

    def _read_parameters(self) -> None:
        copies = [HostCopy(_elements(tensors), own=True) for _, tensors in self._units]
        self._pending[self._age] = copies
        settings = _settings(self._optimizer)
        for unit, _ in self._units:
            unit.settings[self._age] = settings

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Note whether the model is given activations, as a stage of a pipeline is."""
        if self._age == 0 and any(tensor.requires_grad for tensor in tensors_in([args, kwargs])):
            for unit, _ in self._units:
                unit.whole = False

    def see_reduced(self) -> None:
        """Read some elements of the reduced gradients."""
        self._try(self._read_gradients, "reduced")

    def before_update(self, optimizer: Any) -> None:
        """Read the same elements as the optimizer gets them."""
        self._try(self._read_gradients, "applied")

    def _read_gradients(self, when: str) -> None:
        """Read gradients in the run's first step, if this rank is the first of experts."""
        if self._age or not self._reference:
            return
        each = [self._reference, *(tensors for _, tensors in self._units)]
        gradients = [[t.grad for t in tensors if t.grad is not None] for tensors in each]
        if all(gradients):
            self._gradients[when] = [HostCopy(_elements(some), own=True) for some in gradients]

    def on_message(self, step: int, part: MessagePart) -> None:
        """Publish what is on the host, and read what others have published."""
        age = step - self._first_step
        if not self._units or not is_power(age) or age > _LAST_LOOK:
            return
        samples = part.arrays.get("samples_B", b"")
        if len(samples) and age <= _LAST_READING:
            for unit, _ in self._units:
                unit.batches[age] = digest_of(bytes(samples))
        self._try(self._exchange, step)

    def close(self) -> None:
        """Publish the last readings, and look for the others' a last time."""
        if self._age >= 0 and self._units:
            self._try(self._exchange, self._first_step + self._age)

    def _exchange(self, step: int) -> None:
        self._publish()
        if self._look() and self._channel.has_room():
            own = tuple(memoryview(packed) for packed in self._published.values())
            others = tuple(memoryview(packed) for packed in self._others.values())
            self._channel.send(NAME, step, UnitsOfJob(own, others).pack())

    def _try(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:  # the store's process may have ended before this rank
            self._units = self._reference = ()
            _log.debug("groups of the job that hold the same model are not compared: %r", error)

    def _publish(self) -> None:
        for age in [age for age, copies in self._pending.items() if all(c.ready for c in copies)]:
            for (unit, _), copy in zip(self._units, self._pending.pop(age), strict=True):
                unit.readings[age] = np.asarray(copy.numpy(), np.float32)
        self._note_scales()
        if not self._numbers:  # under which the job finds the units
            self._numbers = [int(self._store.add("count", 1)) for _ in self._units]
        for number, (unit, _) in zip(self._numbers, self._units, strict=True):
            content = unit.pack()
            if content != self._published.get(number):
                self._store.set(str(number), content)
                self._published[number] = content

    def _note_scales(self) -> None:
        """Note what the training multiplies gradients by, relative to those of the main unit."""
        copies = [copy for some in self._gradients.values() for copy in some]
        if len(self._gradients) < 2 or not all(copy.ready for copy in copies):
            return
        pairs = zip(self._gradients["applied"], self._gradients["reduced"], strict=True)
        main, *scales = [_ratio(applied.numpy(), reduced.numpy()) for applied, reduced in pairs]
        for (unit, _), scale in zip(self._units, scales, strict=True):
            unit.scale = scale / main if main and math.isfinite(scale / main) else None
        self._gradients = {}

    def _look(self) -> bool:
        """Read what others have published that may be the same model; return whether it is news."""
        total = min(int(self._store.add("count", 0)), MOST_UNITS)
        keys = [str(n) for n in range(1, total + 1) if n not in self._numbers]
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        contents = self._store.multi_get(keys) if keys else ()
        others = {key: bytes(content) for key, content in zip(keys, contents, strict=True)}
        is_news = others != self._others
        self._others = others
        return is_news


def _elements(tensors: Sequence[Tensor]) -> Tensor:
    """Return the first elements of some parameters, float32 ``[E]``, by few kernels."""
    starts: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        start = own(tensor).as_strided((ELEMENTS,), (1,))
        starts.setdefault(start.dtype, []).append(start)
    return torch.cat([torch.cat(some).to(torch.float32) for some in starts.values()])


def _is_readable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and own(tensor).numel() >= ELEMENTS


def _ratio(applied_E: NDArray[Any], reduced_E: NDArray[Any]) -> float:
    """Return the factor between two gradients; NaN without a gradient."""
    if applied_E.shape != reduced_E.shape:
        return math.nan
    reduced = reduced_E.astype(np.float64)
    square = float(reduced @ reduced)
    return float(applied_E.astype(np.float64) @ reduced) / square if square else math.nan


def _settings(optimizer: Any) -> int:
    """Return a digest of the settings of all parameter groups that are numbers on the host."""
    groups = () if optimizer is None else optimizer.param_groups
    plain = [
        sorted((str(k), repr(v)) for k, v in group.items() if _is_plain(v)) for group in groups
    ]
    return digest_of(repr(plain).encode())


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _unit(
    job: Job,
    named: Iterable[tuple[str, Tensor]],
    ranks: Sequence[int],
    *,
    main: bool,
    divisor: float,
    axes: Mapping[str, tuple[int, ...]],
) -> tuple[Unit, Sequence[Tensor]] | None:
    """Return a unit and the parameters to read; None where this rank holds too few elements."""
    trained = [(name, tensor) for name, tensor in named if tensor.requires_grad]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in trained]
    readable = [(name, tensor) for name, tensor in trained if _is_readable(tensor)]
    if not readable:
        return None
    some = readable[:: math.ceil(len(readable) / _MOST_PARAMETERS)]
    types = [tensor.dtype for _, tensor in some]
    some.sort(key=lambda one: types.index(one[1].dtype))  # as they are read
    unit = Unit(
        ranks=tuple(ranks),
        main=main,
        layout=digest_of("\n".join(lines).encode()),
        names=tuple(name for name, _ in some),
        dtype=dtype_name(some[0][1].dtype),
        divisor=divisor,
        wrapper=job.wrapped.kind.grouped_by,
        axes=axes,
        given_dir=job.given_dir,
        seed=torch.initial_seed(),
    )
    return unit, [tensor for _, tensor in some]


def _units_of(job: Job) -> list[tuple[Unit, Sequence[Tensor]]]:
    """Return the units that this rank is the first of, but for those of all ranks of the job."""
    wrapped: Wrapped = job.wrapped
    ranks = ranks_of(wrapped.group)
    groups: list[tuple[Sequence[int], Any, float, Mapping[str, tuple[int, ...]]]]
    groups = [
        (group.ranks, [(p.name, p.tensor) for p in one], group.divisor, outer_axes(one))
        for one in parameters_by_mesh(wrapped.wrapper)
        for group in (one[0].group,)
    ] or [(ranks, wrapped.parameters.items(), 0.0, {})]
    found = []
    for members, named, divisor, axes in groups:
        main = set(members) == set(ranks)
        alone = main and len(members) == dist.get_world_size() and len(groups) == 1
        if not alone and members[0] == dist.get_rank():
            unit = _unit(job, named, members, main=main, divisor=divisor, axes=axes)
            found += [] if unit is None else [unit]
    return found


def _place_of(wrapped: Wrapped) -> str:
    """Return the place in the store of a model's next run, the same for all groups that train it.

    Some ranks may have trained other models before, by themselves or in a smaller job.
    """
    lines = [f"{name} {tuple(tensor.shape)}" for name, tensor in wrapped.parameters.items()]
    model = digest_of("\n".join([f"{dist.get_world_size()} ranks", *lines]).encode())
    _sessions[model] += 1
    return f"rankscope/{NAME}/{model}/{_sessions[model]}"


def make_probe(job: Job) -> WorldProbe | None:
    """Return the probe of this rank's units; None where one group has all ranks of the job."""
    try:
        place = _place_of(job.wrapped)
        units = _units_of(job) if job.exact and not job.local_steps else []
        if not units:
            return None
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(place, default_store())
    except Exception as error:  # a model of an unknown kind, or no store in reach
        _log.debug("groups of the job that hold the same model are not compared: %r", error)
        return None
    experts = [unit for unit, _ in units if not unit.main]
    reference = list(job.wrapped.parameters.values()) if experts else []
    return WorldProbe(
        job, units, [p for p in reference if _is_readable(p)][:_MOST_PARAMETERS], store
    )
