"""What a forward pass decides: experts, largest elements, the sides of its ReLUs.

And what it detaches, through which no gradient flows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.wrappers.passes import tensors_in

_aten: Any = torch.ops.aten
_POOLS = _aten.max_pool2d_with_indices.default
_CHOOSES = frozenset(
    {
        *(_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.max.dim, _aten.min.dim),
        *(_aten.argmax.default, _aten.argmin.default, _aten.multinomial.default, _POOLS),
    }
)
_COPIES = frozenset(
    f"aten::{name}" for name in ("clone", "_to_copy", "cat", "stack")
)  # by name: a torch without one of them loses nothing else
_COLLECTIVES = ("c10d", "_c10d_functional")
_IN_PLACE = _aten.relu_.default
_HAS_KINK = {_aten.relu.default: 0.0, _IN_PLACE: 0.0, _aten.leaky_relu.default: 0.01}
"""Operations with another slope on either side of 0, and their slope below it."""


class Decisions(TorchDispatchMode):
    """Keeps what a forward pass decides the first time for all later ones.

    These are the indices that it chooses, and the sides of its ReLUs: at a kink, no difference
    gives the derivative. What the script detaches is kept as well, unless it communicates that: it
    stops the gradient there on purpose, as straight-through estimators do.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = []
        self._next: int | None = None
        self._detached = _Detached()

    def __enter__(self) -> "Decisions":
        self._detached.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._next = 0
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._detached.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and put the kept indices into the result of one that chooses."""
        if func in _HAS_KINK:
            return self._on_same_side(func, args, kwargs or {})
        if func.namespace in _COLLECTIVES:
            self._detached.forget(args)
        found = func(*args, **(kwargs or {}))
        if func.name() in _COPIES:
            self._detached.follow(args, found)
        if func not in _CHOOSES:
            return found
        chosen = found if isinstance(found, Tensor) else found[1]
        if self._next is None:
            self._kept.append(chosen.clone())
            return found
        at = self._next
        self._next += 1
        if at >= len(self._kept) or self._kept[at].shape != chosen.shape:
            return found
        kept = self._kept[at]
        if isinstance(found, Tensor):
            return kept.clone()
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        axis = given.get("dim", -1)
        if func is _POOLS:
            return args[0].flatten(-2).gather(-1, kept.flatten(-2)).view_as(kept), kept.clone()
        dropped = kept.dim() < args[0].dim()
        values = args[0].gather(axis, kept.unsqueeze(axis) if dropped else kept)
        return (values.squeeze(axis) if dropped else values), kept.clone()

    def _on_same_side(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a ReLU on the sides that it had the first time."""
        given = args[0]
        if self._next is None:
            self._kept.append(given > 0)
            return func(*args, **kwargs)
        at = self._next
        self._next += 1
        if at >= len(self._kept) or self._kept[at].shape != given.shape:
            return func(*args, **kwargs)
        slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", _HAS_KINK[func])
        result = torch.where(self._kept[at], given, slope * given if slope else 0.0)
        return given.copy_(result) if func is _IN_PLACE else result


class _Detached(TorchFunctionMode):
    """Keeps what a script detaches the first time, but for parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor | None] = []
        self._memory: list[set[int]] = []  # of each, and of its copies, the first time
        self._given: list[Tensor] = []  # to the script, so that no other takes their memory
        self._next: int | None = None

    def __exit__(self, *error: Any) -> None:
        self._next = 0
        self._memory.clear()
        self._given.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; return what the first call of its kind has detached."""
        found = func(*args, **(kwargs or {}))
        if func is not Tensor.detach or type(args[0]) is not Tensor:
            return found
        if self._next is None:
            self._kept.append(found.clone())
            self._memory.append(_memory_of(found))
            self._given.append(found)
            return found
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        self._next += 1
        return found if kept is None or kept.shape != found.shape else kept.clone()

    def forget(self, communicated: Any) -> None:
        """Keep nothing of what a collective gets: a gradient that ends there may be a fault."""
        sent = _memory_of(communicated)
        for at, memory in enumerate(self._memory):
            if memory & sent:
                self._kept[at] = None

    def follow(self, originals: Any, copy: Tensor) -> None:
        """Note a copy of tensors, some of which may have been detached."""
        given = _memory_of(originals) if self._memory else set()
        for memory in self._memory:
            if memory & given:
                memory.update(_memory_of(copy))
                self._given.append(copy)


def _memory_of(value: Any) -> set[int]:
    """Return where the plain tensors in a value lie; a DTensor has no memory of its own."""
    plain = [one for one in tensors_in(value) if type(one) is Tensor and one.numel()]
    return {one.untyped_storage().data_ptr() for one in plain}
