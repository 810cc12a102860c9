"""Functions that ``torch.compile`` leaves as they are; torch is not imported for them."""

from collections.abc import Callable
from typing import Any, TypeVar

from rankscope.private import find

_EVAL_FRAME = "torch._C._dynamo.eval_frame"

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Have ``torch.compile`` leave a function, and all that it calls, as they are.

    That is where torch calls it in a compiled region, as autograd calls hooks in a training step
    that is compiled as a whole. A function that traced code calls is traced with it. Torch has to
    be imported before.
    """
    return _left(function, "SKIP")


def transparent(function: Function) -> Function:
    """Have ``torch.compile`` leave a function as it is, and go on in what that calls.

    For functions that stand in place of torch's own, which the compiler passes over in this way.
    The rest is as for :func:`untraced`.
    """
    return _left(function, "DEFAULT")


def _left(function: Function, calls: str) -> Function:
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    found = [find(f"{_EVAL_FRAME}.{name}") for name in names]
    if None not in found:
        set_strategy, make_strategy, action = found
        code: Any = function
        set_strategy(code.__code__, make_strategy(action.SKIP, getattr(action, calls)))
    return function
