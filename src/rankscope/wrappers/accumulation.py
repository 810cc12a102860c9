"""Whether gradients that were reduced wait for those of more micro-batches.

Some trainings reduce in the backward pass of each micro-batch: torchtitan, and DDP without
``no_sync``. Their step ends with the optimizer's call, as any other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor

from rankscope.wrappers.optimizers import all_of
from rankscope.wrappers.ranks import local_of

_MOST_AT_FIRST = 64
_MOST_PARTS = 16  # more optimizers have a parameter or a layer each, and are called together
_FEW_UPDATES = 8  # in which an optimizer may wait for its first turn

_State = tuple["ref[Tensor]", int, int]
"""A gradient, its version, and the version of its local part, if it is a DTensor."""


class Accumulation:
    """Decides whether a step goes on after a reduction.

    Gradients wait for more as long as the optimizer was not called, and one of them is still what
    the last reduction has left: neither taken away nor changed. A training that skips an update,
    as with a gradient scaler, zeroes its gradients all the same. A sharded gradient counts as
    unchanged until something is added to it, or it is taken away.

    At most as many forward passes make a step as came before some call of the optimizer so far. So
    a worker that leaves the optimizer out has as many steps as the others. Where a step ended too
    early, so that the next one added to its gradients and an update took both, both count. Passes
    whose gradients were taken away before the update do not, if other updates took fewer.

    Several calls of a pipeline schedule may make an update. There a step has at least as many
    forward passes as each update so far took, even if gradients are taken away between the calls.

    Several optimizers may take turns, as in a GAN: each zeroes the gradients of its own parameters,
    and a backward pass of one may add to gradients of another, which are thrown away later. So the
    parameters whose gradients are old are left out of a step where another optimizer's are new.

    An optimizer of copies, one for each parameter, gets the gradients of the parameters. To other
    tensors of its own, as DeepSpeed's on the host, no backward pass adds.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor] | None = None) -> None:
        several = all_of(optimizer)
        parts = several if len(several) <= _MOST_PARTS else (optimizer,)
        self._parts = [_Part(each, parameters or {}) for each in parts]
        self._old: list[_Part] = []
        self._num_updates = 0
        self._left: tuple[_Part, _State] | None = None
        self._most_passes = 0
        self._fewest_passes = 0  # that an update took
        self._earlier_passes = 0  # of the steps that ended since the last update
        self._waiting_passes = 0  # of those of them whose gradients still wait for an update
        self._dropped_passes = 0  # of the step, whose gradients were reduced and taken away
        self._reduced = False  # in this step
        self.thrown_away = False
        """Whether all that was reduced in the step was gone when the last backward pass began."""
        self.set_aside = False
        """Whether a gradient was reduced and taken away since the last update."""

    def see_reduced(self) -> None:
        """Note that a reduction is over."""
        self._reduced = True
        states = ((part, part.state()) for part in self._parts)
        self._left = next(((part, state) for part, state in states if state is not None), None)

    def see_clipped(self, parameters: Any, *_: Any, **__: Any) -> None:
        """Note that the training has clipped these gradients, which may wait for more all the same.

        Some loops clip after each micro-batch, as they should not.
        """
        part, _left = self._left or (None, None)
        if part is not None and part.is_among(parameters):
            self.see_reduced()

    def see_updated(self, num_passes: int, optimizer: object) -> None:
        """Note that this optimizer was called, after so many forward passes of the step."""
        applied = self._waiting_passes + num_passes - self._dropped_passes
        self._most_passes = max(self._most_passes, applied)
        self._waiting_passes = 0
        self._num_updates += 1
        for part in self._parts:
            if part.optimizer is optimizer or part in self._old or len(self._parts) == 1:
                part.see_applied()

    def end_step(self, num_passes: int, *, updated: bool) -> None:
        """Note the end of a step of so many forward passes, and whether an update came."""
        self._earlier_passes += num_passes
        if updated:
            taken = self._earlier_passes
            self._fewest_passes = min(self._fewest_passes or taken, taken)
            self._earlier_passes = 0
        waits = not updated and self._waits()
        self.set_aside = not updated and (self.set_aside or (self._reduced and not waits))
        self._waiting_passes = self._waiting_passes + num_passes if waits else 0
        self._dropped_passes = 0
        self._reduced = False

    def adds_to_applied(self, num_passes: int = 0) -> bool:
        """Return whether a backward pass that begins now adds to gradients that were applied.

        The gradients of the step's ``num_passes`` forward passes before its own may have been taken
        away, as where a loop skips an update.
        """
        if not self._waits():
            self._waiting_passes = 0
        self.thrown_away = self._reduced and all(part.state() is None for part in self._parts)
        if self.thrown_away:
            self._dropped_passes = num_passes
            self.set_aside = True
        parts = [part for part in self._parts if not part.is_apart]
        self._old = [part for part in parts if part.is_unchanged(part.applied, whole=True)]
        used = [part for part in parts if part.is_used or self._num_updates < _FEW_UPDATES]
        adds = bool(self._old) and len(self._old) == len(used)
        if adds:
            self._old = []  # nothing shows which are updated next
        return adds

    def old(self) -> frozenset[str]:
        """Return the parameters whose gradients are old while those of others are new.

        As of the last :meth:`adds_to_applied`.
        """
        return frozenset().union(*(part.names for part in self._old))

    def goes_on(
        self,
        num_passes: int,  # of the step so far, after which the optimizer was not called
        *,
        in_calls: bool = False,  # calls of a pipeline schedule have reduced them
    ) -> bool:
        """Return whether the next micro-batch's gradients will be added to the reduced ones."""
        if in_calls and num_passes < self._fewest_passes:
            return True
        most = max(self._most_passes, self._fewest_passes)
        if num_passes >= (most or _MOST_AT_FIRST):
            return False
        return self._waits()

    def _waits(self) -> bool:
        part, left = self._left or (None, None)
        return part is not None and part.is_unchanged(left)


class _Part:
    """One of the optimizers, with its parameters' gradients."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.applied: _State | None = None  # of a gradient of its parameters, as it was applied
        self.is_used = False  # its parameters ever had a gradient
        self._parameter: Tensor | None = None
        self._copied: Sequence[Tensor] = ()
        own = {id(parameter) for parameter in self._parameters()}
        self.names = frozenset(name for name, p in parameters.items() if id(p) in own)
        if not self.names and _shapes(self._parameters()) == _shapes(parameters.values()):
            self._copied = tuple(parameters.values())
        self.is_apart = bool(parameters) and not (self.names or self._copied)

    def see_applied(self) -> None:
        """Note the state of a gradient that was applied: the one that a pass reaches late."""
        self._parameter = None
        self.applied = self.state()

    def _gradient(self) -> Tensor | None:
        """Return the gradient of the first parameter that has one, then of the same one."""
        if self._parameter is None or self._parameter.grad is None:
            self._parameter = None
            for parameter in self._parameters():
                if parameter.grad is not None:
                    self._parameter = parameter
                    break
        self.is_used |= self._parameter is not None
        return None if self._parameter is None else self._parameter.grad

    def state(self) -> "_State | None":
        """Return that gradient and its versions."""
        gradient = self._gradient()
        if gradient is None:
            return None
        return ref(gradient), gradient._version, local_of(gradient)._version

    def is_unchanged(self, before: "_State | None", *, whole: bool = False) -> bool:
        """Return whether the gradient is unchanged; of a DTensor, its local part or all of it.

        A reduction adds to the local part. A training that changes a DTensor leaves the version of
        its local part.
        """
        if before is None:
            return False
        reference, version, version_of_part = before
        gradient = reference()
        if gradient is None or self._gradient() is not gradient:
            return False
        if local_of(gradient)._version != version_of_part:
            return False
        return gradient._version == version or not whole

    def is_among(self, parameters: Any) -> bool:
        """Return whether the parameter whose gradient is followed is one of these."""
        several = (parameters,) if isinstance(parameters, Tensor) else parameters
        return any(parameter is self._parameter for parameter in several)

    def _parameters(self) -> Iterable[Tensor]:
        if self._copied:  # no backward pass adds to the gradients of the copies
            return self._copied
        groups = getattr(self.optimizer, "param_groups", None) or ()  # some have none
        held = [group.get("params", ()) for group in groups if isinstance(group, Mapping)]
        return chain.from_iterable(held)


def _shapes(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tensor.shape) for tensor in tensors)
