"""Gradients of single micro-batches, from a reduction that never lets them add up in ``.grad``.

``rankscope.order_free`` takes each micro-batch's gradient away as soon as it exists. Hooks on
parameters would find nothing there, or parts; taps get the gradients here instead.

The accumulated gradient is never in ``.grad`` then. Sketches of micro-batches add up to its
sketch, and their norms are exact; with more than one, the norm of the sum is an estimate
(:class:`~rankscope.wrappers.parts.GradientParts`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.parts import GradientParts
from rankscope.wrappers.tap import LocalGradient

Watcher = Callable[[Tensor, Tensor], None]
"""Gets a parameter and its gradient in one micro-batch, before that is taken away."""


@dataclass(slots=True)
class MicroBatchStream:
    """A model's gradients as they come, one micro-batch at a time.

    Attributes:
        factor: The reduced gradient is the mean over workers times this: W where workers'
            gradients are summed, else 1.
        watchers: Functions that get the gradients; they must not raise.
    """

    factor: float
    watchers: list[Watcher] = field(default_factory=list)

    def pass_on(self, parameter: Tensor, gradient: Tensor) -> None:
        """Pass a gradient to all watchers."""
        for see in tuple(self.watchers):
            see(parameter, gradient)


_streams: "WeakKeyDictionary[nn.Module, MicroBatchStream]" = WeakKeyDictionary()


def register_stream(model: nn.Module, stream: MicroBatchStream) -> None:
    """Register a wrapped model whose gradients are taken away one by one from now on."""
    _streams[model] = stream


def stream_of(model: nn.Module) -> MicroBatchStream | None:
    """Return the stream of a wrapped model; None if it was not registered."""
    return _streams.get(model)


class StreamReader:
    """Measures gradients that come one by one."""

    def __init__(self, stream: MicroBatchStream, sketcher: Sketcher) -> None:
        self.parts = GradientParts(sketcher)
        self._adds_up = sketcher.sketches
        self._stream = stream
        self._num_passes = 0
        self._see: Watcher | None = None

    def watch(self, see: Watcher) -> None:
        """Call a function with each gradient from now on."""
        self._see = see
        self._stream.watchers.append(see)

    def remove(self) -> None:
        """Watch no more."""
        if self._see in self._stream.watchers:
            self._stream.watchers.remove(self._see)

    def reset(self) -> None:
        """Begin a new step."""
        self.parts.reset()
        self._num_passes = 0

    def end_pass(self) -> None:
        """Close a micro-batch."""
        self.parts.close()
        self._num_passes += 1

    @property
    def valid(self) -> bool:
        """Whether the totals are those of the step: norms alone do not add up over parts."""
        return self._adds_up or self.parts.count == 1

    def gradient(
        self, reduced: GradientTotals | None, carried_over: Tensor | None
    ) -> LocalGradient:
        """Return the step's measurements.

        Args:
            reduced: The totals of the reduced gradient, scaled in place to those of the mean over
                workers.
            carried_over: Watcher :class:`~rankscope.wrappers.tap.LocalGradient`.
        """
        count = self.parts.count
        one_each = count > 1 and count == self._num_passes
        if reduced is not None:
            reduced.scale(1 / self._stream.factor)
        return LocalGradient(
            self.parts.totals(),
            reduced,
            self.parts.part_squared_norms() if one_each else None,
            carried_over,
            norm_estimated=count > 1,
        )
