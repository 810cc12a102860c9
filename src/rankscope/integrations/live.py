"""What a script has made that nobody handed over: its optimizers, and other models that it trains.

Both are found among the objects that Python's garbage collector knows, once.
"""

import gc
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rankscope.session.scope import Scope
from rankscope.session.wrapping import in_training_mode

_Kind = TypeVar("_Kind")
_INNER = ("optimizer", "_optimizer")  # under which Accelerate and Lightning keep what they wrap
_CONTAINED = ("optimizers", "_optimizers")  # under which torchtitan and its like keep several


def live_objects(*kinds: type) -> dict[type, list[Any]]:
    """Return all living objects of some classes and their subclasses, by class.

    Only the types of objects are looked at: some objects act when they are asked anything.
    """
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    kind_of: dict[type, type | None] = {}
    for thing in gc.get_objects():
        exact = type(thing)
        if exact not in kind_of:
            kind_of[exact] = next((kind for kind in kinds if kind in exact.__mro__), None)
        kind = kind_of[exact]
        if kind is not None:
            found[kind].append(thing)
    return found


class Surroundings:
    """What lives beside a model when its training begins.

    Args:
        model: What the training calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
        wrappers = [DistributedDataParallel, FSDPModule, *([engine] if engine else [])]
        found = live_objects(Optimizer, Scope, *wrappers)
        self._optimizers: list[Optimizer] = found[Optimizer]
        self._wrappers = [wrapper for kind in wrappers for wrapper in found[kind]]
        self.is_watched = any(not scope._closed for scope in found[Scope])
        """Whether the script watches itself."""

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the model, the one of the most elements first."""
        parameters = list(self._model.parameters())
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        ranked = []
        for optimizer in _without_wrappers(self._optimizers):
            own = [
                place[id(parameter)]
                for group in optimizer.param_groups
                for parameter in group["params"]
                if id(parameter) in place
            ]
            if own:
                elements = sum(parameters[number].numel() for number in own)
                ranked.append((-elements, min(own), type(optimizer).__name__, optimizer))
        ranked.sort(key=lambda entry: entry[:3])
        return [entry[-1] for entry in ranked]

    def other_models(self) -> list[nn.Module]:
        """Return other data-parallel models that are being trained, the outermost ones."""
        known = {id(parameter) for parameter in self._model.parameters()}
        others = [
            wrapper
            for wrapper in self._wrappers
            if in_training_mode(wrapper)
            and any(p.requires_grad and id(p) not in known for p in wrapper.parameters())
            and not any(id(p) in known for p in wrapper.parameters())
        ]
        inner = {id(part) for other in others for part in other.modules() if part is not other}
        return [other for other in others if id(other) not in inner]


def _without_wrappers(optimizers: Sequence[Optimizer]) -> Iterable[Optimizer]:
    """Leave out optimizers that only pass calls on to another one of them.

    A container of several is one of its own.
    """
    known = {id(optimizer) for optimizer in optimizers}
    for optimizer in optimizers:
        inner = [vars(optimizer).get(name) for name in _INNER]
        for name in _CONTAINED:
            several = vars(optimizer).get(name)
            several = several.values() if isinstance(several, dict) else several
            if isinstance(several, Collection) and len(several) == 1:
                inner += several
        if not any(id(thing) in known for thing in inner if thing is not optimizer):
            yield optimizer
