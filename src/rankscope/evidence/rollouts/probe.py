"""The gap between the log-probabilities of rollouts and the trainer's, in reinforcement learning.

An engine that draws completions returns the probability of each token. The trainer, which holds the
same weights, computes it again. The gap is the engine's: stale or other weights, another precision,
another temperature.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, StepEnd
from rankscope.gradients.host import Numbers, copy_numbers
from rankscope.wrappers.samples import is_dense

_log = logging.getLogger("rankscope")


class RolloutProbe(Probe):
    """Collects the gap of one step on one worker; unusable values are declined in the log."""

    def __init__(self) -> None:
        self._sums: list[Numbers] = []
        self._declined = False

    def give_rollout(self, trainer: Any, rollout: Any, mask: Any = None) -> None:
        """Add the log-probabilities of a micro-batch's tokens, by the trainer and by the engine.

        All are of one shape, such as ``[B, n]``, the mask of tokens that count too. Values that are
        not finite do not count.
        """
        problem = _problem(trainer, rollout, mask)
        if not problem:
            self._sums.append(_begin(trainer, rollout, mask))
        elif not self._declined:
            self._declined = True
            _log.warning(
                "scope.rollout expected tensors of equal shape on one device, the trainer's and "
                "the rollout's log-probabilities and maybe a mask; it got %s, and records no gap "
                "of it",
                problem,
            )

    def collect(self, end: StepEnd) -> Pending | None:
        """Return the step's gap, if log-probabilities were given."""
        sums, self._sums = self._sums, []
        return Awaited(sums, partial(_gap, sums)) if sums else None

    def abort(self) -> None:
        """Forget the values given so far."""
        self._sums = []


def _gap(sums: Sequence[Numbers]) -> MessagePart:
    """Wait for the device; return ``rollout_gap``, if any token has one."""
    pairs = [each.numpy().tolist() for each in sums]
    tokens = sum(count for _, count in pairs)
    gap = sum(total for total, _ in pairs) / tokens if tokens else math.nan
    return MessagePart({"rollout_gap": gap})


@torch.no_grad()
def _begin(trainer: Tensor, rollout: Tensor, mask: Tensor | None) -> Numbers:
    apart = (trainer.detach().float() - rollout.detach().float()).abs()
    known = torch.isfinite(apart)
    if mask is not None:
        known &= mask != 0
    total = torch.where(known, apart, 0.0).sum(dtype=torch.float64)
    return copy_numbers(torch.stack([total, known.sum().double()]), torch.float64, own=True)


def _problem(trainer: Any, rollout: Any, mask: Any) -> str:
    """Return in words why values cannot be compared; empty if they can."""
    given = [trainer, rollout, *([] if mask is None else [mask])]
    for each in given:
        if not isinstance(each, Tensor):
            return f"a value of type {type(each).__name__}"
        if not is_dense(each):
            return f"a tensor of type {type(each).__name__} whose elements are not at hand"
    if not (trainer.is_floating_point() and rollout.is_floating_point()):
        return f"log-probabilities in {trainer.dtype} and {rollout.dtype}"
    shapes = [tuple(each.shape) for each in given]
    if len(set(shapes)) > 1:
        return f"the shapes {', '.join(map(str, shapes))}"
    devices = {str(each.device) for each in given}
    return "" if len(devices) == 1 else f"tensors on {' and '.join(sorted(devices))}"


def make_probe(job: Job) -> RolloutProbe:
    """Return the probe of gaps."""
    return RolloutProbe()
