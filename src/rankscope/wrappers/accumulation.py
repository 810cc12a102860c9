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

_State = tuple["ref[Tensor]", int, int]
"""A gradient, its version, and the version of its local part, if it is a DTensor."""


class Accumulation:
    """Decides whether a step goes on after a reduction.

    Gradients wait for more as long as the optimizer was not called, and one of them is still what
    the last reduction has left: neither taken away nor changed. A training that skips an update,
    as with a gradient scaler, zeroes its gradients all the same. A sharded gradient counts as
    unchanged until something is added to it, or it is taken away.

    At most as many forward passes make a step as came before some call of the optimizer so far. So
    a worker that leaves the optimizer out has as many steps as the others.

    Several calls of a pipeline schedule may make an update. There a step has at least as many
    forward passes as each update so far took, even if gradients are taken away between the calls.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameter: Tensor | None = None
        self._left: _State | None = None
        self._applied: _State | None = None
        self._most_passes = 0
        self._fewest_passes = 0  # that an update took
        self._earlier_passes = 0  # of the steps that ended since the last update

    def see_reduced(self) -> None:
        """Note that a reduction is over."""
        self._left = self._state()

    def see_updated(self, num_passes: int) -> None:
        """Note that the optimizer was called, after so many forward passes of the step."""
        self._most_passes = max(self._most_passes, num_passes)
        self._applied = self._state()

    def end_step(self, num_passes: int, *, updated: bool) -> None:
        """Note the end of a step of so many forward passes, and whether an update came."""
        self._earlier_passes += num_passes
        if updated:
            taken = self._earlier_passes
            self._fewest_passes = min(self._fewest_passes or taken, taken)
            self._earlier_passes = 0

    def adds_to_applied(self) -> bool:
        """Return whether a backward pass that begins now adds to gradients that were applied."""
        return self._is_unchanged(self._applied, as_a_whole=True)

    def goes_on(self, num_passes: int, *, in_calls: bool = False) -> bool:
        """Return whether the next micro-batch's gradients will be added to the reduced ones.

        Args:
            num_passes: Forward passes of the step so far, after which the optimizer was not called.
            in_calls: Whether calls of a pipeline schedule have reduced them.
        """
        if in_calls and num_passes < self._fewest_passes:
            return True
        if num_passes >= (self._most_passes or _MOST_AT_FIRST):
            return False
        return self._is_unchanged(self._left)

    def _is_unchanged(self, before: "_State | None", *, as_a_whole: bool = False) -> bool:
        """Return whether a gradient is unchanged; of a DTensor, its local part or all of it.

        A reduction adds to the local part. A training that changes a DTensor leaves the version of
        its local part.
        """
        now = None if self._parameter is None else self._parameter.grad
        if before is None or now is None:
            return False
        gradient, whole, part = before
        if now is not gradient() or _part_of(now)._version != part:
            return False
        return now._version == whole or not as_a_whole

    def _state(self) -> "_State | None":
        gradient = self._gradient()
        if gradient is None:
            return None
        return ref(gradient), gradient._version, _part_of(gradient)._version

    def _gradient(self) -> Tensor | None:
        """Return the gradient of the first parameter that has one."""
        if self._parameter is None or self._parameter.grad is None:
            trained = (parameter for parameter in self._parameters() if parameter.grad is not None)
            self._parameter = next(trained, None)
        return None if self._parameter is None else self._parameter.grad

    def _parameters(self) -> Iterator[Tensor]:
        for group in getattr(self._optimizer, "param_groups", None) or ():  # some have none
            if isinstance(group, Mapping):
                yield from group.get("params", ())


def _part_of(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
