"""Calls of a model's parts, for a training that never calls its forward pass.

Such a training calls methods of the model, as reinforcement learning does, or its parts. A part is
a submodule that holds parameters. Calls inside of another part's are that part's own.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.wrappers.calls import ModuleHook
from rankscope.wrappers.untraced import untraced
from rankscope.wrappers.wrapped import takes_hooks


class PartCall:
    """A call of a part, with a graph."""

    __slots__ = ("counts", "name", "part", "trained")

    def __init__(self, name: str, part: nn.Module) -> None:
        self.name = name  # of the part in the model, as ``get_submodule`` takes it
        self.part = part
        self.counts = True
        self.trained = False  # a gradient has arrived at what it returned

    @untraced
    def see_gradient(self, gradient: Tensor | None) -> None:
        """Note that a backward pass has reached the call."""
        self.trained = True


class PartCalls:
    """Sees the outermost calls of a model's parts.

    ``wanted``: whether calls count now; ``wants_all``: whether those do whose input others
    have computed; ``began`` takes a call and its inputs, ``ended`` it and its output.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Callable[[], bool],
        wants_all: Callable[[], bool],
        began: Callable[[PartCall, Any, Any], None],
        ended: Callable[[PartCall, Any], None],
    ) -> None:
        self._wanted = wanted
        self._wants_all = wants_all
        self._began = began
        self._ended = ended
        self._thread = threading.get_ident()
        self._running: PartCall | None = None
        self._called: set[str] = set()  # names of parts
        self._whole = True  # no hook was taken out
        self._hooks = {
            name: ModuleHook(part, partial(self._before, name), self._after)
            for name, part in _parts_of(model)
        }

    def _before(self, name: str, part: Any, args: Any, kwargs: Any) -> None:
        if self._running is not None or not torch.is_grad_enabled():
            return
        if threading.get_ident() == self._thread and self._wanted():
            self._called.add(name)
            call = self._running = PartCall(name, self._part(part))
            computed = bool(args) and getattr(args[0], "grad_fn", None) is not None
            call.counts = not computed or self._wants_all()
            if call.counts:
                self._began(call, args, kwargs)

    def _after(self, part: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running
        if call is not None and call.part is self._part(part):
            self._running = None
            if call.counts:
                self._ended(call, output)

    @staticmethod
    def _part(called: Any) -> nn.Module:
        """Return the part behind what is called: a compiled one is another module."""
        part: nn.Module = getattr(called, "_orig_mod", called)
        return part

    def end_step(self) -> None:
        """Forget a call that has raised; after a step with calls, let go of what lies in these."""
        self._running = None
        if not (self._whole and self._called):
            return
        self._whole = False
        for name in list(self._hooks):
            above = (name[:at] for at, letter in enumerate(name) if letter == ".")
            if any(each in self._called for each in above):
                self._hooks.pop(name).remove()

    def remove(self) -> None:
        """See no more calls."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that hold parameters and can be called, with their names."""
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    holders |= {name[:at] for name in holders for at, c in enumerate(name) if c == "."}
    for name, part in model.named_modules():
        if name not in holders - {""} or not takes_hooks(part):
            continue
        if type(part).forward is not nn.Module.forward:
            yield name, part
