"""Objects of the training process, found by their classes."""

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain, compress, repeat
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rankscope.private import find

ITERATOR: Any = find("torch.utils.data.dataloader._BaseDataLoaderIter")
"""The class of the iterators of data loaders; None if torch has none."""

REDUCING = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
"""Classes of torch's that reduce gradients of what they wrap."""

WRAPPING = (*REDUCING, DataParallel)
_SHARED: tuple[Any, ...] = (nn.Module, DataLoader, LRScheduler, *([ITERATOR] if ITERATOR else []))
_FRAMEWORKS = {"transformers.trainer": "Trainer", "accelerate.accelerator": "Accelerator"}
_walk: ContextVar[dict[type, list[Any]] | None] = ContextVar("walk", default=None)


@contextmanager
def one_walk() -> Iterator[None]:
    """Let calls within, for modules, loaders, schedulers or :func:`framework`, share one walk.

    It goes over all objects of the process: a tenth of a second for some hundred thousand.
    """
    found = _walk.get()
    token = _walk.set({} if found is None else found)
    try:
        yield
    finally:
        _walk.reset(token)


def live_objects(*kinds: type) -> dict[type, list[Any]]:
    """Return all living objects of some classes and their subclasses, by class.

    Only the types of objects are read: some objects act at any access.
    """
    found = _walk.get()
    shared = (*_SHARED, *filter(None, map(framework, _FRAMEWORKS)))
    if found is None or not set(shared).issuperset(kinds):
        return _find(kinds)
    if not found:
        found.update(_find(shared))
    return {kind: found[kind] for kind in kinds}


def framework(module: str) -> Any:
    """Return the class of a framework's module that holds a training, None if it is not loaded."""
    return getattr(sys.modules.get(module), _FRAMEWORKS[module], None)


def _find(kinds: Sequence[type]) -> dict[type, list[Any]]:
    kind_of = {id(exact): kind for kind in reversed(kinds) for exact in _with_subclasses(kind)}
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for thing in _objects_of(kind_of):
        found[kind_of[id(type(thing))]].append(thing)
    return found


def _with_subclasses(kind: type) -> set[type]:
    classes = {kind}
    pending = [kind]
    while pending:
        new: set[type] = set(type.__subclasses__(pending.pop())) - classes
        classes |= new
        pending += new
    return classes


def _objects_of(classes: dict[int, type]) -> list[Any]:
    """Return the objects whose exact class is one of these, by the identity of the class.

    Python lists tuples that another thread is still building too, and building one fails where
    somebody else refers to it. So all is one call into C, between whose parts no thread can run:
    the lists are made, looked through and dropped within it.
    """
    collects = gc.isenabled()
    gc.disable()  # a collection runs Python code of others
    try:
        twice = chain.from_iterable(map(repeat, map(gc.get_objects, (0, 1, 2)), repeat(2)))
        chosen: Any = twice
        for function in (type, id, classes.__contains__):
            chosen = map(partial(map, function), chosen)
        return list(chain.from_iterable(map(compress, twice, chosen)))
    finally:
        if collects:
            gc.enable()


_CONTAINERS = (dict, OrderedDict, list)


def living_containers(shortest: int, longest: int) -> list[Any]:
    """Return the plain dicts and lists that begin with a tensor and have a length within these."""
    exact: dict[int, type] = {id(kind): kind for kind in _CONTAINERS}
    found = _objects_of(exact)
    fits = map(range(max(shortest, 1), longest + 1).__contains__, map(len, found))
    return [one for one in compress(found, fits) if issubclass(type(_first(one)), Tensor)]


def _first(container: Any) -> Any:
    return container[0] if type(container) is list else next(iter(container.values()))


def container_name(container: Any) -> str:
    """Return the attribute or variable that holds a dict or list; its kind if none is found."""
    for holder in gc.get_referrers(container):
        names = holder if type(holder) is dict else _attributes_of(holder)
        for name, value in [*names.items()]:  # other threads may add some
            if value is container and type(name) is str:
                owner = type(holder).__name__ if names is not holder else _owner_of(names)
                return f"{owner}.{name}" if owner else name
    return f"a {type(container).__name__.lower()} of {len(container)} tensors"


def _owner_of(attributes: dict[Any, Any]) -> str:
    owners = [one for one in gc.get_referrers(attributes) if _attributes_of(one) is attributes]
    return type(owners[0]).__name__ if owners and not isinstance(owners[0], ModuleType) else ""


def _attributes_of(thing: Any) -> dict[Any, Any]:
    """Return an object's own attributes, past what its class makes of the access."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def frozen_modules(outside: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost of some modules, all of whose parameters are frozen."""
    yield from _outermost([each for each in outside if _is_frozen(each)])


def unheld_modules(outside: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost of some modules that are not frozen, and that no optimizer trains."""
    held: set[int] = set()
    for optimizer in live_objects(Optimizer)[Optimizer]:
        held.update(id(p) for group in optimizer.param_groups for p in group["params"])
    modules = [each for each in outside if _is_plain(each, lambda p: id(p) not in held)]
    yield from (each for each in _outermost(modules) if not _is_frozen(each))


def _outermost(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    parts = {id(part) for each in modules for part in each.modules() if part is not each}
    yield from (each for each in modules if id(each) not in parts)


def living_modules(inside: Container[int]) -> list[nn.Module]:
    """Return the living modules that are in no wrapper, and not ``inside`` by their ids."""
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    wrapped = [each for each in modules if issubclass(type(each), WRAPPING)]
    apart = {id(part) for each in wrapped for part in each.modules()}
    return [each for each in modules if id(each) not in apart and id(each) not in inside]


def _is_frozen(module: nn.Module) -> bool:
    return _is_plain(module, lambda parameter: not parameter.requires_grad)


def _is_plain(module: nn.Module, fits: Callable[[Tensor], bool]) -> bool:
    """Return whether a module's parameters are ordinary tensors, all of which fit."""
    try:
        found = list(module.parameters())
    except Exception:  # such as a module that was never initialised
        return False
    return bool(found) and all(
        fits(p) and type(p.data) is Tensor and not p.is_meta and p.numel() for p in found
    )


def label_of(module: nn.Module) -> str:
    """Return a module's class and its number of elements."""
    size = sum(parameter.numel() for parameter in module.parameters())
    return f"{type(module).__name__} ({size:,} elements)"
