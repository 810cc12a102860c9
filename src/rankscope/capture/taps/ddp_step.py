"""What is known of a step under DDP."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepState:
    """What is known of the step that runs; there is a new one for each.

    Attributes:
        begun: A backward pass that is due has begun.
        carried_over: See :class:`~rankscope.capture.taps.tap.LocalGradient`.
        through_ddp: A forward pass went through DDP.
        synchronises: The last forward pass is one whose backward pass reduces.
        settled: The reduction is over.
        reduced_known: The reduced gradient was read.
        reduced_product: Its inner product with the local one.
        spoiled: What was measured is not the step's local gradient.
    """

    begun: bool = False
    carried_over: Tensor | None = None
    through_ddp: bool = False
    synchronises: bool = False
    settled: bool = False
    reduced_known: bool = False
    reduced_product: Tensor | None = None
    spoiled: bool = False
