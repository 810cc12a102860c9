"""The local gradient under ``DistributedDataParallel``, read before DDP copies it to a bucket.

The tap is a post-accumulate hook per parameter. Unlike a communication hook it leaves DDP's own
path alone, which keeps every bit of the training as it was (a communication hook changes bits at
W = 3: DDP then divides at another place), and it sees the accumulated local gradient with bucket
views, ``no_sync``, static graphs and unused parameters alike.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.capture.sketch import GradientMeasure, Sketcher
from rankscope.capture.tap import LocalGradient

Guarded = Callable[[Callable[[], None]], None]


class DDPTap:
    """A :class:`~rankscope.capture.tap.GradientTap` for DDP.

    Args:
        model: The wrapped model.
        sketcher: Measures the gradients.
        guarded: Runs a function so that it can neither raise into the backward pass nor run
            after the monitor was disabled.
    """

    def __init__(
        self, model: DistributedDataParallel, sketcher: Sketcher, guarded: Guarded
    ) -> None:
        self._model = model
        self._sketcher = sketcher
        self._guarded = guarded
        self._total = sketcher.new_measure()
        self._separate: dict[str, GradientMeasure] = {}
        self._fired: set[str] = set()
        self._spoiled = False
        self._measure = False
        self._synchronises = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        ]

    def begin_forward(self, *, measure: bool) -> None:
        """Announce a forward pass in training. DDP decides here whether backward synchronises."""
        self._synchronises = self._model.require_backward_grad_sync
        self._measure = measure

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has run since the last :meth:`collect`."""
        return bool(self._fired)

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""
        for measure in self._separate.values():
            self._total.add(measure)
        valid = self._measure and not self._spoiled and self.complete
        gradient = (
            LocalGradient(self._total.sketch.clone(), self._total.squared_norm.clone())
            if valid
            else None
        )
        self._total.reset()
        for measure in self._separate.values():
            measure.reset()
        self._fired.clear()
        self._spoiled = False
        return gradient

    def remove(self) -> None:
        """Take all hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if self._synchronises:
            self._guarded(partial(self._read, name, parameter))

    def _read(self, name: str, parameter: Tensor) -> None:
        again = name in self._fired
        self._fired.add(name)
        if not self._measure or parameter.grad is None:
            return
        into = self._separate.get(name)
        if again and into is None:
            # Reentrant checkpointing of a shared parameter fires several times and the last
            # gradient holds the total. This step's total is lost; from now on this parameter
            # has totals of its own, which can be overwritten.
            self._separate[name] = self._sketcher.new_measure()
            self._spoiled = True
            return
        if into is not None:
            into.reset()
        self._sketcher.measure(name, parameter.grad, into or self._total)
