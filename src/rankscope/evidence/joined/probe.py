"""Finds parameters that train, and whose gradients are not measured.

They were frozen or in no optimizer at ``watch``; or they are of a model of its own, without wrapper
perhaps, that is not watched.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.bus.words import shortened
from rankscope.evidence.joined import BEGINS, INSIDE, KEY
from rankscope.gradients.digest import digest_tensor
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.facts import owned_names
from rankscope.wrappers.optimizers import all_of
from rankscope.wrappers.wrapped import trained_in

EVERY = 8
"""Calls of the optimizer from one look to the next."""

MOST_NAMES = 8
_NAMED = 3


class JoinedProbe(Probe):
    """Sends the number of parameters that have joined the training, and names of the first.

    All ranks send a digest of those of models that are not watched, the ``first`` one all else.

    ``frozen`` are those at ``watch``; what the optimizer is given later has joined, too. Gradients
    of ``measured`` ones are measured already. Of those ``inside`` the model, the wrapper leaves
    others alone: they were added after it, or are experts. ``ignored`` ones are compared elsewhere.
    """

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        optimizer: Any,
        measured: Mapping[str, Tensor],
        *,
        first: bool,
        inside: Mapping[str, Tensor] | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self._optimizer = optimizer
        self._is_first = first
        self._outside: dict[str, int] = {}  # digests that were not sent, by names
        # by weak references: the training may drop a parameter
        self._frozen = {name: weakref.ref(tensor) for name, tensor in frozen.items()}
        own = [*frozen.values(), *measured.values(), *self._updated()]
        self._known = {id(tensor): weakref.ref(tensor) for tensor in own}
        self._num_updated = len(self._updated())
        held = inside or {}
        self._inside = {id(p): name for name, p in held.items() if name not in ignored}
        known = {id(p) for p in (*frozen.values(), *measured.values())}
        known.update(id(held[name]) for name in ignored if name in held)
        self._beside = {
            id(p): weakref.ref(p) for p in self._updated() if id(p) not in known and p.requires_grad
        }
        self._others: Any = weakref.WeakKeyDictionary()  # calls of optimizers
        self._num_calls = 0
        self._num_joined = 0
        self._names: list[str] = []
        self._changed = False

    def before_update(self, optimizer: Any) -> None:
        """Look for such parameters, while they have their gradients."""
        self._num_calls += 1
        if self._num_calls in (1, EVERY) and self._beside:
            held = _whole({number: one() for number, one in self._beside.items()})
            when = BEGINS if self._num_calls == 1 else ""
            inside = {number: p for number, p in held.items() if number in self._inside}
            self._digest(inside, [self._inside[number] for number in inside], INSIDE + when)
            beside = {number: p for number, p in held.items() if number not in inside}
            self._digest(beside, owned_names(beside), when)
        if self._num_calls % EVERY or not self._is_first:
            return
        joined = [
            name
            for name, frozen in self._frozen.items()
            if (p := frozen()) is not None and p.requires_grad and p.grad is not None
        ]
        for name in joined:
            del self._frozen[name]
        updated = self._updated()
        if len(updated) != self._num_updated:
            self._num_updated = len(updated)
            for tensor in updated:
                known = self._known.get(id(tensor), lambda: None)
                if known() is not tensor and tensor.requires_grad:
                    self._known[id(tensor)] = weakref.ref(tensor)
                    joined.append(f"a tensor of shape {tuple(tensor.shape)}")
        self._num_joined += len(joined)
        self._names += joined[: MOST_NAMES - len(self._names)]
        self._changed |= bool(joined)

    def see_other_update(self, optimizer: Any) -> None:
        """Count a call of an optimizer that is none of the run's; look at what it holds once.

        Copies that an optimizer keeps of a model are parameters of no module, and do not count.
        """
        calls = self._others[optimizer] = self._others.get(optimizer, 0) + 1
        if calls != EVERY or any(optimizer is own for own in all_of(self._optimizer)):
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        new = {id(p): p for p in held if self._known.get(id(p), lambda: None)() is not p}
        names = owned_names(new) if new else []
        self._known |= {number: weakref.ref(p) for number, p in new.items()}
        self._num_joined += len(names)
        self._names += names[: MOST_NAMES - len(self._names)]
        self._changed |= bool(names)
        whole = _whole(new)
        self._digest(whole, owned_names(whole) if whole else [])

    def _digest(self, outside: Mapping[int, Tensor], names: Sequence[str], when: str = "") -> None:
        """Digest parameters that are not watched, if all of them have a name."""
        if names and len(names) == len(outside):
            values = [int(digest_tensor(p.detach())) for p in outside.values()]
            self._outside[shortened(names, _NAMED) + when] = digest_of(np.array(values).tobytes())
            self._changed = True

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the number by name, in a step in which it has changed, and new digests."""
        if not self._changed:
            return None
        self._changed = False
        held = dict.fromkeys(self._names, self._num_joined) if self._is_first else {}
        outside, self._outside = self._outside, {}
        both = {StateKind.JOINED: held, StateKind.OUTSIDE: outside}
        return Ready(MessagePart(names={KEY: {kind: each for kind, each in both.items() if each}}))

    def _updated(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _whole(parameters: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
    """Return those that are there, and of which each worker holds all."""
    return {
        number: p
        for number, p in parameters.items()
        if p is not None and type(p.data) is Tensor and not p.is_meta and p.numel() > 0
    }


def make_probe(job: Job) -> Probe | None:
    """Return the probe, where the optimizer holds the model's tensors."""
    wrapped: Any = job.wrapped
    if not wrapped.kind.own_optimizer:
        return None
    if getattr(job.optimizer, "param_groups", None) is None:
        return None
    named = wrapped.every_parameter()
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    return JoinedProbe(
        frozen,
        job.optimizer,
        wrapped.parameters,
        first=not job.rank,
        inside={} if wrapped.kind.in_parts else trained_in(wrapped.module),
        ignored=wrapped.left_out(),
    )
