"""The training's calls of torch's functions that clip gradients, by their norm or by value.

``clip_grad_norm_``, the frameworks that call it, and loops that take the norm in one call and scale
by it in another all use two functions. Scripts import them by name before anything is watched, so
the function is replaced that torch's decorator holds, inside of the one that has the name.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rankscope.bus.words import dtype_name
from rankscope.private import find
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.untraced import transparent

_ROUNDINGS = 8
"""In the norms of tensors, the norm of these, the factor, its product, and the norm after it."""
_OF_AN_ELEMENT = 1e-10
"""Relative error of torch's float32 norm on the CPU per element: 8e-5 at 4 million elements."""
_LEAST = 1e-5


class _Decorated:
    """What a decorator made, with the function inside as its only attribute ``func``."""

    __slots__ = ("_cell",)

    def __init__(self, outer: Any) -> None:
        names = getattr(getattr(outer, "__code__", None), "co_freevars", ())
        self._cell: Any = dict(zip(names, getattr(outer, "__closure__", None) or ())).get("func")  # noqa: B905

    @property
    def func(self) -> Any:
        """The function inside."""
        return self._cell.cell_contents

    @func.setter
    def func(self, function: Any) -> None:
        self._cell.cell_contents = function

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"func": self.func}


class _ClippingRelay(Relay):
    """Relays the calls of a function whose first argument is any iterable of tensors."""

    num_calls = 0  # while something listened

    def __init__(self, path: str) -> None:
        super().__init__(_Decorated(find(path)), "func")

    def _relay(self, original: Any) -> Any:
        relay = super()._relay(original)

        @transparent
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self.num_calls += 1
            if args and not isinstance(args[0], Tensor | list | tuple):
                args = (list(args[0]), *args[1:])  # an iterator can be read once
            return relay(*args, **kwargs)

        return call


NORM = _ClippingRelay("torch.nn.utils.clip_grad._get_total_norm")
"""Calls that take the norm of gradients."""

CLIP = _ClippingRelay("torch.nn.utils.clip_grad._clip_grads_with_norm_")
"""Calls that scale gradients down, given their norm."""


VALUE = _ClippingRelay("torch.nn.utils.clip_grad.clip_grad_value_")
"""Calls that clip each element of gradients."""


def rounding_of(parameters: Sequence[Tensor]) -> float:
    """Return the relative error of the norm of their gradients, and of clipping by it, at most.

    ``8 u`` with the unit roundoff u of the widest rounding among their types; torch's norm of a
    tensor of n elements errs by up to ``1e-10 n`` more on the CPU, where it adds in float32.
    """
    types = {dtype_name(parameter.dtype) for parameter in parameters}
    widest = max((UNIT_ROUNDOFF.get(each, 0.0) for each in types), default=0.0)
    largest = max((p.numel() for p in parameters if p.device.type == "cpu"), default=0)
    return _LEAST + _ROUNDINGS * widest + _OF_AN_ELEMENT * largest
