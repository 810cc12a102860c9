"""Who else looks at gradients while a tap reads them."""

from typing import Protocol

from torch import Tensor


class GradientWitness(Protocol):
    """Is shown gradients at two moments of a backward pass, on the training thread."""

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, before the reduction.

        With several micro-batches it is called for each, with the gradient accumulated so far.

        Args:
            name: The parameter's canonical name.
            gradient: Any shape; it may be overwritten as soon as this returns.
        """

    def see_reduced(self) -> None:
        """Be told that the reduction is over, before anything else touches the gradients."""
