"""Sums over the batch of what the layers of a model return, and of its gradients: for ``--bisect``.

A sum over the first dimension of an output, over all micro-batches and workers, does not depend on
how the global batch is dealt out. It is kept per layer without children, in float32.

Hooks on each layer also show which ones draw random numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.bus.parity import OUTPUT, OUTPUT_GRADIENT, TensorFigures
from rankscope.evidence.parity.figures import FigureMeter
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.wrapped import takes_hooks

Take = Callable[[str, str, Tensor], None]


class LayerOutputs:
    """Adds up the outputs of a model's layers, and the gradients of them.

    ``take`` is called for each of them with its kind and the layer's name, and passes it on to
    :meth:`add`; ``counts`` returns whether a forward pass of the training is under way;
    ``name_of`` returns a layer's name among those of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        take: Take,
        counts: Callable[[], bool],
        name_of: Callable[[str], str] = str,
    ) -> None:
        self._take = take
        self._counts = counts
        self._sums: dict[tuple[str, str], Tensor | None] = {}  # by kind and name; None: uneven
        self._without: set[str] = set()  # layers that are computed again, for the backward pass
        self._meters: dict[tuple[str, int], FigureMeter] = {}
        self._hooks = [
            each.register_forward_hook(functools.partial(self._see, canonical_name(name_of(name))))
            for name, each in module.named_modules()
            if name and takes_hooks(each) and not any(True for _ in each.children())
        ]

    def _see(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        found = [each for each in tensors_in(output) if each.is_floating_point()]
        if not found or not found[0].dim() or isinstance(found[0], DTensor):
            return
        tensor = found[0]
        if self._counts():
            self._take(OUTPUT, name, tensor)
            if not tensor.requires_grad:
                self._without.add(name)
        elif name not in self._without:
            return  # computed again by a checkpoint whose first pass has a graph
        if tensor.requires_grad:
            take = functools.partial(self._take_gradient, name)
            tensor.register_hook(take)  # type: ignore[no-untyped-call]

    def _take_gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # as where the loss leaves an output of DDP alone
            self._take(OUTPUT_GRADIENT, name, gradient)

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Add an output, or its gradient."""
        own = tensor.detach().float().sum(0)
        known = self._sums.get((kind, name), own)
        even = known is not None and known.shape == own.shape
        self._sums[kind, name] = (own if known is own else known + own) if even else None  # type: ignore[operator]

    def collect(self) -> tuple[dict[str, TensorFigures], dict[str, list[int]]]:
        """Return the figures by kind, and the sums' shapes by name; start again.

        Names are in the order of the forward pass. Outputs whose shape has changed have none.
        """
        sums, self._sums = self._sums, {}
        self._without.clear()
        figures: dict[str, TensorFigures] = {OUTPUT: TensorFigures()}
        shapes = {}
        for (kind, name), tensor in sums.items():
            if tensor is None:
                continue
            shapes[name] = list(tensor.shape)
            key = (name, tensor.numel())
            if key not in self._meters:
                self._meters[key] = FigureMeter({name: tensor.numel()}, tensor.device)
            own = self._meters[key].measure([(name, tensor)])
            figures[kind] = figures.get(kind, TensorFigures()).plus(own)
        return figures, shapes

    def remove(self) -> None:
        """Take all hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class LayerHooks:
    """The hooks of one layer; only torch's own generators are read, and none is moved."""

    def __init__(self, see: Callable[..., None], name: str) -> None:
        self._see = see
        self._name = name
        self._states: list[Tensor] = []
        self.hooks: list[Any] = []

    def before(self, module: nn.Module, args: Any) -> None:
        """A layer is about to compute."""
        self._states = _states()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has."""
        states = zip(self._states, _states(), strict=False)
        drew = any(not torch.equal(old, new) for old, new in states)
        self._see(self._name, output, drew=drew)
        for hook in self.hooks:
            hook.remove()


def _states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states
