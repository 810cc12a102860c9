"""Whether gradients that were reduced wait for those of more micro-batches.

Some trainings reduce in the backward pass of each micro-batch: torchtitan, and DDP without
``no_sync``. Their step ends with the optimizer's call, as any other.
"""

from collections.abc import Iterator, Mapping
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOST_AT_FIRST = 64

_Known = tuple["ref[Tensor]", int]
"""A gradient, and its version."""


class Accumulation:
    """Tells whether a step goes on after a reduction.

    Gradients wait for more as long as the optimizer was not called, and one of them is still what
    the last reduction has left: neither taken away nor changed. A training that skips an update,
    as with a gradient scaler, zeroes its gradients all the same.

    At most as many forward passes make a step as came before some call of the optimizer so far. So
    a worker that leaves the optimizer out has as many steps as the others.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameter: Tensor | None = None
        self._left: _Known | None = None
        self._applied: _Known | None = None
        self._most_passes = 0

    def see_reduced(self) -> None:
        """Take note that a reduction is over."""
        gradient = self._gradient()
        self._left = None if gradient is None else (ref(gradient), _version_of(gradient))

    def see_updated(self, num_passes: int) -> None:
        """Take note that the optimizer was called, after so many forward passes of the step."""
        self._most_passes = max(self._most_passes, num_passes)
        gradient = self._gradient()
        self._applied = None if gradient is None else (ref(gradient), _version_of(gradient))

    def adds_to_applied(self) -> bool:
        """Return whether a backward pass that begins now adds to what the optimizer has applied."""
        return self._is_there(self._applied)

    def goes_on(self, num_passes: int) -> bool:
        """Return whether the next micro-batch's gradients will be added to what was reduced.

        Args:
            num_passes: Forward passes of the step so far, after which the optimizer was not called.
        """
        if num_passes >= (self._most_passes or _MOST_AT_FIRST):
            return False
        return self._is_there(self._left)

    def _is_there(self, known: "_Known | None") -> bool:
        """Return whether a gradient is what it was."""
        now = None if self._parameter is None else self._parameter.grad
        if known is None or now is None:
            return False
        gradient, version = known
        return now is gradient() and _version_of(now) == version

    def _gradient(self) -> Tensor | None:
        """Return the gradient of the parameter that is looked at, which has one."""
        if self._parameter is None or self._parameter.grad is None:
            known = (parameter for parameter in self._parameters() if parameter.grad is not None)
            self._parameter = next(known, None)
        return None if self._parameter is None else self._parameter.grad

    def _parameters(self) -> Iterator[Tensor]:
        for group in getattr(self._optimizer, "param_groups", None) or ():  # some have none
            if isinstance(group, Mapping):
                yield from group.get("params", ())


def _version_of(gradient: Tensor) -> int:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient)._version
