"""Gradients of single micro-batches, shown by a reduction that never lets them add up in ``.grad``.

``rankscope.order_free`` takes each micro-batch's gradient away as soon as it exists. Whoever reads
gradients in hooks of its own would find nothing there, or parts; it asks here instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

See = Callable[[Tensor, Tensor], None]
"""Is shown a parameter and its gradient in one micro-batch, before that is taken away."""


@dataclass(slots=True)
class AloneGradients:
    """A model's gradients as they come, one micro-batch at a time.

    Attributes:
        factor: The reduced gradient is the mean over workers times this: W where workers'
            gradients are summed, else 1.
        watchers: Who is shown the gradients; they must not raise.
    """

    factor: float
    watchers: list[See] = field(default_factory=list)

    def show(self, parameter: Tensor, gradient: Tensor) -> None:
        """Show a gradient to all who watch."""
        for see in tuple(self.watchers):
            see(parameter, gradient)


_models: "WeakKeyDictionary[nn.Module, AloneGradients]" = WeakKeyDictionary()


def announce_alone(model: nn.Module, gradients: AloneGradients) -> None:
    """Say that a wrapped model's gradients are taken away one by one from now on."""
    _models[model] = gradients


def alone_gradients(model: nn.Module) -> AloneGradients | None:
    """Return the gradients of a wrapped model if they are taken away one by one."""
    return _models.get(model)
