"""Who else looks at gradients while a tap reads them."""

from collections.abc import Collection, Iterable
from typing import Protocol

from torch import Tensor


class SeesReduced(Protocol):
    """Is told when a reduction is over."""

    def see_reduced(self) -> None:
        """Be told that the reduction is over, before anything else touches the gradients."""


class GradientObserver(SeesReduced, Protocol):
    """Is shown gradients at two moments of a backward pass, on the training thread."""

    @property
    def wanted_names(self) -> Collection[str]:
        """Canonical names of the parameters whose local gradient it wants to see in this step.

        To show it others as well costs time, and does nothing. Known from the step's first forward
        pass on.
        """

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, before the reduction.

        With several micro-batches it is called for each, with the gradient accumulated so far.

        Args:
            name: The parameter's canonical name.
            gradient: Any shape; it may be overwritten as soon as this returns.
        """

    def see_locals(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take local gradients of several parameters at once, by name: on a device, one launch."""


class BothSee:
    """Shows a observer everything, and tells another when the reduction is over.

    Args:
        observer: Sees it first.
        other: Is told of the end of the reduction alone.
    """

    def __init__(self, observer: GradientObserver, other: SeesReduced) -> None:
        self.see_local, self.see_locals = observer.see_local, observer.see_locals
        self._observer, self._other = observer, other

    @property
    def wanted_names(self) -> Collection[str]:
        """What the observer wants to see."""
        return self._observer.wanted_names

    def see_reduced(self) -> None:
        """Tell both."""
        self._observer.see_reduced()
        self._other.see_reduced()
