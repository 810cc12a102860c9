"""Everything of one worker's step that is compared exactly, beside samples and settings.

One place for the meters whose moments in a step differ: :class:`ExactEvidence` passes each moment
on to those that want it, and :class:`NoEvidence` to none.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from rankscope.capture.state.environment import PrecisionMeter
from rankscope.capture.state.meter import StateMeter
from rankscope.capture.state.private_rng import PrivateRandomMeter
from rankscope.capture.state.rng import LoaderMeter, RandomMeter
from rankscope.capture.state.turn import PendingState, nothing_pending

Values = Mapping[str, float]


class ExactEvidence:
    """Digests of state, random generators, precision and data-loader workers.

    Args:
        module: The model inside the wrapper.
        device: Where it computes.
        state: Digests parameters, buffers, optimizer state and gradients.
        loader: The training's data loader; None if it was not given.
        updates_all: Whether the model holds what a step leaves as soon as ``optimizer.step``
            returns. Then it is read there, for what a script does to it after its last step is
            no part of the training. Else it is read when the step is collected.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        state: StateMeter,
        loader: Any,
        *,
        updates_all: bool = False,
    ) -> None:
        self._updates_all = updates_all
        self._state_read = False
        self._precisions = PrecisionMeter(module, device)
        self._state = state
        self._random = RandomMeter(device)
        self._private = PrivateRandomMeter(module, loader)
        self._loader = LoaderMeter(loader)
        self._precision: float = math.nan
        self._step = -1
        # What is told of gradients, of the forward pass that enters the module, and of the
        # optimizer that is about to run, goes on as it is.
        self.see_local, self.see_locals = state.see_local, state.see_locals
        self.see_reduced = state.see_reduced
        self.see_applied = state.see_applied
        self.enter_module = state.enter_module

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters whose local gradient is compared in this step."""
        return self._state.wanted_names

    def begin_step(self, step: int) -> None:
        """Begin a step, unless it has begun already."""
        if self._step != step:
            self._step = step
            self._state_read = False
            self._state.begin_step(step)

    def before_forward(self, *, first: bool) -> None:
        """Look at the first forward pass of a step: later ones are like it."""
        if first:
            self._precision = self._precisions.code(self._step)
            self._random.before_forward()
            self._private.before_forward()
            self._state.before_forward()

    def after_forward(self) -> None:
        """See which random generators have moved."""
        self._random.after_forward()

    def see_updated(self) -> None:
        """Read what the step has left, if it has left it by now; the last call counts."""
        if self._updates_all:
            self._state.see_state()
            self._state_read = True

    def collect(self, step: int) -> tuple[PendingState, Values]:
        """Read what was not read yet, and return all without waiting for the device."""
        self.begin_step(step)
        if not self._state_read:
            self._state.see_state()
        values = {
            **self._random.collect(),
            **self._private.collect(),
            **self._loader.collect(),
            "precision": self._precision,
        }
        return self._state.collect(), values

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._state.collect()
        self._random.collect()
        self._private.collect()
        self._step = -1

    def remove(self) -> None:
        """Give the data loader its own function back."""
        self._loader.remove()


class NoEvidence:
    """Compares nothing."""

    wanted_names: Collection[str] = ()

    def see_local(self, *args: Any, **kwargs: Any) -> None:
        """Look away."""

    see_locals = see_reduced = begin_step = before_forward = enter_module = see_local
    after_forward = see_applied = see_updated = abort = remove = see_local

    def collect(self, step: int) -> tuple[PendingState, Values]:
        """Return nothing."""
        return nothing_pending(), {}


EvidenceMeter = ExactEvidence | NoEvidence
