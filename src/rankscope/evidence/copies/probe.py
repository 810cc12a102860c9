"""Reads a few elements of copies of the model, from step to step.

A copy is a module that the optimizer does not hold. An *average* has the names and shapes of the
watched model, or of a part of it, and moves towards it: where ``a`` is the average and ``p`` the
model after an update,

    a' = a + s (p - a),

and the share ``s``, one minus the decay, follows from two readings. Of frozen modules outside of
the model, whatever their names, it is read whether they were written, and whether they changed.

An average may also be a dict or a list of tensors, with the names of the model's parameters or
their shapes in order. These are looked for again at each reading, as such a program often puts new
tensors in their places; where there are none, only at steps 0, 1, 8, 64 and so on, as a search goes
over all objects of the process.
"""

import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.bus.probe import Awaited, Job, MessagePart, RareProbe, is_power
from rankscope.bus.replicas import StateKind
from rankscope.evidence.copies import AGAIN, KEY
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import Floats, digest_of
from rankscope.wrappers.labels import own
from rankscope.wrappers.living import (
    container_name,
    frozen_modules,
    label_of,
    living_containers,
    living_modules,
)
from rankscope.wrappers.optimizers import all_of

_log = logging.getLogger("rankscope")

ELEMENTS = 4
"""Elements of each parameter that are read."""

_MOST_PARAMETERS = 64
_MOST_COPIES = 8
_MOST_CANDIDATES = 4096  # dicts and lists that may be averages
_SEARCH_AGAIN = 8  # times the age at which none was found
_STRAY = 0.05  # of the average's way: a larger rest is no move towards the model

_FEWEST_APART = 16  # elements
_KEPT = (Tensor, nn.Parameter, DTensor)
_NARROW = {torch.bfloat16, torch.float16}

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy, and the part of the model that it is an average of."""

    label: str
    module: weakref.ref[nn.Module]
    source: weakref.ref[nn.Module] | None  # None of a module with other names or shapes


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read of one copy at one time."""

    elements: HostCopy
    source: HostCopy | None
    writes: int | None  # of its tensors, so far; None of a dict or a list
    narrow: torch.dtype | None  # its type, where that has 16 bits
    shapes: Sequence[torch.Size]  # of what this rank holds of its tensors
    buffers: tuple[HostCopy, HostCopy] | None  # its own and the model's, in evaluation mode

    @property
    def awaited(self) -> Iterator[HostCopy | None]:
        """All that is on its way from the device."""
        yield from (self.elements, self.source, *(self.buffers or ()))


def _read_all(now: Mapping[str, _Reading], last: Mapping[str, _Reading]) -> MessagePart:
    """Wait for the device; return integers by name, a share by its bits.

    The name begins with the copy's, and a bar. ``bits`` is a digest, ``model`` that of the model,
    ``writes`` the number of writes, ``equal`` whether it is the model's present value, ``share`` as
    above, ``rest`` the share of elements that rounding may have kept, see :func:`rest_of`,
    ``stale`` whether its buffers rest while the model's change, 0 where they change.
    """
    held: dict[str, int] = {}
    for label, one in now.items():
        elements_E = one.elements.numpy().astype(np.float64)
        values = {"bits": digest_of(elements_E.tobytes())}
        if one.writes is not None:
            values["writes"] = one.writes
        if one.source is not None:
            source_E = one.source.numpy().astype(np.float64)
            values["model"] = digest_of(source_E.tobytes())
            values["equal"] = int(np.array_equal(elements_E, source_E))
            before = last.get(label)
            if before is not None and before.shapes == one.shapes:  # else sharded, or gathered
                before_E = before.elements.numpy()
                share = share_of(before_E, elements_E, source_E)
                values["share"] = int(np.float64(share).view(np.int64))
                if one.narrow is not None:
                    rest = rest_of(before_E, elements_E, source_E, one.narrow)
                    values["rest"] = int(np.float64(rest).view(np.int64))
                if one.buffers is not None and before.buffers is not None:
                    pairs = zip(before.buffers, one.buffers, strict=True)
                    kept, still = (np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
                    if not (kept and still):
                        values["stale"] = int(kept)
        held |= {f"{label}|{what}": value for what, value in values.items()}
    return MessagePart(names={KEY: {str(StateKind.FOLLOWS): held}})


def share_of(before_E: NDArray[Any], after_E: Floats, model_E: Floats) -> float:
    """Return which share of its way to the model an average has gone; NaN if it moved otherwise.

    Example:
        >>> before, model = np.array([0.0, 1.0]), np.array([1.0, 3.0])
        >>> round(share_of(before, before + 0.25 * (model - before), model), 6)
        0.25
        >>> share_of(before, model[::-1] + 9, model)
        nan
    """
    start_E = before_E.astype(np.float64)
    way_E = model_E - start_E
    gone_E = after_E - start_E
    square = float(way_E @ way_E)
    size = float(np.linalg.norm(gone_E))
    if not (0 < square < math.inf and math.isfinite(size)):
        return math.nan
    share = float(way_E @ gone_E) / square
    return share if float(np.linalg.norm(gone_E - share * way_E)) <= _STRAY * size else math.nan


def rest_of(before_E: NDArray[Any], after_E: Floats, model_E: Floats, dtype: torch.dtype) -> float:
    """Return how many elements of an average stay, of those that are not where the model is.

    NaN while none moves, and where too few are elsewhere: a plain copy is the model's value in the
    type of the copy.

    Example:
        >>> model, before = np.linspace(1, 2, 32) + 0.1, np.linspace(1, 2, 32)
        >>> after = np.where(np.arange(32) < 8, before + 0.01, before)
        >>> rest_of(before, after, model, torch.bfloat16)
        0.75
    """
    copied_E = torch.from_numpy(model_E).to(dtype).double().numpy()
    apart_E = copied_E != after_E
    kept_E = before_E.astype(np.float64) == after_E
    if kept_E.all() or np.count_nonzero(apart_E) < _FEWEST_APART:
        return math.nan
    return float(kept_E[apart_E].mean())


class CopiesProbe(RareProbe):
    """Reads the copies before steps 0, 1, 2, 4, 8 and so on, and before each one after these."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.first_step)
        self._job = job
        self._step = -1
        self._copies: list[_Copy] | None = None
        self._last: tuple[int, dict[str, _Reading]] = (-2, {})
        self._search_age = 0  # dicts and lists are not searched before, except for known ones

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read the copies before the step's first forward pass, where it is due."""
        age = step - self._first_step
        if step == self._step or not (is_power(age) or is_power(age - 1)):
            return
        self._step = step
        try:
            self._read(age)
        except Exception as error:  # whatever other modules of the process are
            self._copies = []
            _log.debug("copies of the model are not read: %r", error)

    @torch.no_grad()
    def _read(self, age: int) -> None:
        if self._copies is None:
            self._copies = list(find_copies(self._job.wrapped.module, self._job.optimizer))
        now: dict[str, _Reading] = {}
        for copy in self._copies:
            module = copy.module()
            source = None if copy.source is None else copy.source()
            if module is None or (copy.source is not None and source is None):
                continue
            tensors = _readable(module.parameters())
            sources = [] if source is None else _readable(source.parameters())
            writes = sum(tensor._version for tensor in tensors)
            buffers = None if source is None else _buffers(module, source)
            now[copy.label] = _reading(tensors, sources, writes, buffers)
        before_age, before = self._last
        searches = is_power(age) and age >= self._search_age
        if searches or before.keys() - now.keys():
            held = [p for copy in self._copies if (m := copy.module()) for p in m.parameters()]
            kept = find_kept(self._job.wrapped.module, self._job.optimizer, held)
            for label, theirs, models in kept[: _MOST_COPIES - len(now)]:
                now.setdefault(label, _reading(_readable(theirs), _readable(models), None, None))
            self._search_age = age if kept else _SEARCH_AGAIN * age
        self._last = age, now
        if now:
            before = before if before_age == age - 1 else {}
            readings = (*now.values(), *before.values())
            copies = [copy for one in readings for copy in one.awaited]
            self.pending = Awaited(copies, partial(_read_all, now, before))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        super().abort()
        self._step = -1


def _reading(
    tensors: Sequence[Tensor],
    sources: Sequence[Tensor],
    writes: int | None,
    buffers: tuple[HostCopy, HostCopy] | None,
) -> _Reading:
    shapes = [tensor.shape for tensor in tensors]
    types = {tensor.dtype for tensor in tensors}
    alike = bool(sources) and [tensor.shape for tensor in sources] == shapes
    return _Reading(
        _elements(tensors),
        _elements(sources) if alike else None,
        writes,
        types.pop() if len(types) == 1 and types <= _NARROW else None,
        shapes,
        buffers,
    )


def _trained_in(model: nn.Module, optimizer: Any) -> tuple[set[int], dict[Shapes, nn.Module]]:
    """Return the ids of trained parameters, and the parts of the model that hold most of them."""
    groups = [group for each in all_of(optimizer) for group in each.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    parts: dict[Shapes, nn.Module] = {}
    for part in model.modules():
        held = [parameter for parameter in part.parameters() if id(parameter) in trained]
        if held and 2 * len(held) >= len(trained):  # else a layer of any other model may look alike
            parts.setdefault(_shapes(part), part)
    return trained, parts


def find_kept(
    model: nn.Module, optimizer: Any, known: Iterable[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return dicts and lists of tensors that may be averages: their name, tensors, and the model's.

    Those that share memory with the model or with tensors that are ``known`` are left out, and so
    are several of one name: ranks, and later sessions, could take one for the other.
    """
    trained, parts = _trained_in(model, optimizer)
    models: list[dict[str, Tensor]] = []
    for part in parts.values():
        named: dict[str, Tensor] = {canonical_name(n): p for n, p in part.named_parameters()}
        models += [named, {name: p for name, p in named.items() if id(p) in trained}]
    lengths = {len(each) for each in models}
    longest = max(lengths, default=0) + sum(1 for _ in model.buffers())
    if not lengths:
        return []
    inside = {_memory(p) for p in (*known, *model.parameters())} - {0}
    candidates = living_containers(min(lengths), longest)
    matching = []
    for kept in candidates if len(candidates) <= _MOST_CANDIDATES else ():
        pairs = next(filter(None, (_pairs(kept, named) for named in models)), None)
        if pairs is not None and not any(_memory(theirs) in inside for theirs, _ in pairs):
            matching.append((kept, pairs))
    found: dict[str, list[tuple[str, list[Tensor], list[Tensor]]]] = {}
    for kept, pairs in matching if len(matching) <= _MOST_COPIES else ():  # a name takes a while
        theirs, sources = map(list, zip(*pairs, strict=True))
        label = f"{container_name(kept)} ({sum(own(one).numel() for one in theirs):,} elements)"
        found.setdefault(label, []).append((label, theirs, sources))
    return [each[0] for each in found.values() if len(each) == 1]


def _memory(tensor: Tensor) -> int:
    return own(tensor).data_ptr()  # 0 of one without elements


def _pairs(kept: Any, named: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors of a dict or list with the parameters that they are copies of, if all."""
    values = kept if isinstance(kept, list) else list(kept.values())
    if isinstance(kept, dict):
        by_name = {canonical_name(key): value for key, value in kept.items() if type(key) is str}
        if by_name.keys() >= named.keys():
            values = [by_name[name] for name in named]
    if len(values) != len(named) or not all(map(_is_kept, values)):
        return None
    pairs = list(zip(values, named.values(), strict=True))
    return pairs if all(own(one).shape == own(p).shape for one, p in pairs) else None


def _is_kept(value: object) -> bool:
    if type(value) not in _KEPT:
        return False
    tensor: Any = value
    return not (tensor.requires_grad or tensor.is_meta or tensor.is_inference())


def find_copies(model: nn.Module, optimizer: Any) -> Iterator[_Copy]:
    """Yield the averages of the model's parts, and other frozen modules outside of the model."""
    trained, parts = _trained_in(model, optimizer)
    inside = {id(part) for part in model.modules()}
    outside = living_modules(inside)
    inner = {id(part) for each in outside for part in each.modules() if part is not each}
    outermost = [each for each in outside if id(each) not in inner]
    averages = list(_averages([model, *outermost], parts, trained))
    seen = {id(part) for module, _ in averages for part in module.modules()}
    others = [one for one in frozen_modules(outside) if seen.isdisjoint(map(id, one.modules()))]
    found = [*averages, *((each, None) for each in others)][:_MOST_COPIES]
    labels = [label_of(module) for module, _ in found]
    for number, (module, source) in enumerate(found):
        again = labels[:number].count(labels[number])
        label = f"{labels[number]}{AGAIN}{again + 1}" if again else labels[number]
        yield _Copy(label, weakref.ref(module), None if source is None else weakref.ref(source))


def _averages(
    waiting: list[nn.Module], parts: dict[Shapes, nn.Module], trained: set[int]
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield the outermost modules that are copies of a part, each once and with this part."""
    seen: set[int] = set()  # a wrapper leads to the watched model's parts again
    while waiting:
        module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        held = list(module.parameters())
        source = parts.get(_shapes(module)) if held else None
        if source is not None and not any(id(parameter) in trained for parameter in held):
            yield module, source
        elif held:
            waiting += module.children()


def _shapes(module: nn.Module) -> Shapes:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _readable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return some of a copy's tensors, as far as this rank holds them."""
    local = [own(p.detach()) for p in tensors if not p.is_meta]
    kept = [p for p in local if p.is_floating_point() and p.is_contiguous() and p.numel()]
    return kept[:: max(math.ceil(len(kept) / _MOST_PARAMETERS), 1)]


def _buffers(average: nn.Module, model: nn.Module) -> tuple[HostCopy, HostCopy] | None:
    """Begin to read the buffers that both have; None where the average does not evaluate by its."""
    trains = {name for name, part in average.named_modules() if part.training}
    others = dict(model.named_buffers())
    pairs = [
        (own(buffer), own(others[name]))
        for name, buffer in average.named_buffers()
        if name in others
        and buffer.is_floating_point()
        and name.rpartition(".")[0] not in trains
        and buffer.shape == others[name].shape
    ]
    both = [pair for pair in pairs if all(one.is_contiguous() and one.numel() for one in pair)]
    if not both:
        return None
    theirs, models = zip(*both[:_MOST_PARAMETERS], strict=True)
    return _elements(theirs), _elements(models)


def _elements(tensors: Sequence[Tensor]) -> HostCopy:
    """Begin to read the first elements of some tensors, float32 ``[E]``."""
    starts = [tensor.view(-1)[:ELEMENTS].float() for tensor in tensors]
    return HostCopy(torch.cat(starts) if starts else torch.empty(0), own=True)


def make_probe(job: Job) -> CopiesProbe | None:
    """Return the probe of copies; None where nothing is compared."""
    return CopiesProbe(job) if job.exact and job.optimizer is not None else None
