"""Hooks of the monitor inside objects that belong to the training."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True
)
"""Returns what is about to trace all that is called; None if nothing is."""


class ForeignHook:
    """A hook on the training's module that stays behind when the module is compiled or copied.

    ``torch.compile`` runs it as it is, without tracing it. A copy of the module, in memory or in a
    file, gets a hook that does nothing, and needs no monitor to be loaded.

    Args:
        hook: What to call.
        compiled: Whether to call it in a module that is compiled as well. It cuts the module's
            graph in two there, which one that is compiled with ``fullgraph=True`` does not bear.
    """

    def __init__(self, hook: Callable[..., None], *, compiled: bool = True) -> None:
        self._hook = hook
        self._untraced = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._compiled = compiled

    def __call__(self, *args: Any) -> None:
        """Call the hook; it returns nothing, so inputs and outputs stay as they are."""
        if torch.compiler.is_compiling():
            if self._compiled:
                self._untraced(*args)
        elif _callback() is None:
            self._hook(*args)
        else:
            self._untraced(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and stored as a method of the standard library that takes anything, returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")
