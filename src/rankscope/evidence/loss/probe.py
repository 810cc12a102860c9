"""The local loss of each micro-batch, on its way to the root."""

import math
from array import array as typed_array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.probe import Content, Evaluated, Job, MessagePart, Probe, StepEnd
from rankscope.bus.weighting import LEAST_SCALER
from rankscope.evidence.loss.meter import LossMeter, MicroBatchLoss
from rankscope.gradients.host import Numbers
from rankscope.wrappers.labels import shifts_labels

_DOUBLE = 8  # bytes
_NAN = np.full(1, np.nan).tobytes()


@dataclass(frozen=True, slots=True)
class PendingLosses:
    """The losses of one step; they may still be on the device."""

    losses: Sequence[MicroBatchLoss]  # one entry per micro-batch
    multipliers: Numbers | None  # multipliers of the losses before backward; None if unknown
    summed_workers: float  # how many workers' gradients the reduction adds up: 1 for their mean

    @property
    def ready(self) -> bool:
        """Whether all can be read without waiting."""
        if self.multipliers is not None and not self.multipliers.ready:
            return False
        return all(micro.ready for micro in self.losses)

    def read(self) -> MessagePart:
        """Wait for the device; return losses and weights, one micro-batch after the other."""
        if self.multipliers is not None and any(one.constant is not None for one in self.losses):
            factors_M = self.multipliers.numpy()
            return MessagePart(arrays=_trained_losses(self.losses, factors_M, self.summed_workers))
        parts = _loss_parts(self.losses, [_packed(micro.values) for micro in self.losses])
        if self.multipliers is not None:
            parts["multipliers_M"] = _packed(self.multipliers)
        return MessagePart(arrays=parts)


class LossProbe(Probe):
    """Collects the losses of one worker's steps.

    ``shifted``: whether the model predicts the next token, so that the first label of each sequence
    is not a target.
    """

    def __init__(self, *, shifted: bool) -> None:
        self._new_meter = partial(LossMeter, shifted=shifted)
        self._meter = self._new_meter()
        self.give = self._meter.give
        self._before_update = (0, 0)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Note which losses were given before the optimizer's call."""
        self._before_update = self._meter.num_given

    def take_later(self, num_passes: int) -> Callable[[int], None]:
        """Take losses out of the step that belong to the next, whose backward pass begins.

        They were given after the optimizer's call, and the step has one of each of its passes. The
        function returned puts them into the step by then, as those of a forward pass.
        """
        later = self._new_meter()
        if self._before_update[0] >= num_passes:
            self._meter.move(self._before_update, later)
        return partial(self._meter.absorb, later)

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """Read the loss in the model's output, if any."""
        self._meter.see(output, kwargs, forward)

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated:
        """Keep the loss apart until it proves to be trained on."""
        losses = self._new_meter()
        losses.see(output, kwargs)
        move = partial(self._meter.move, self._meter.num_given, losses)
        return Evaluated(move, partial(self._meter.absorb, losses))

    def collect(self, end: StepEnd) -> PendingLosses:
        """Return the losses of the step's forward passes that had a backward pass."""
        losses, multipliers = self._meter.collect(end.idle)
        return PendingLosses(losses, multipliers, end.summed_workers)

    def abort(self) -> None:
        """Forget the step's losses."""
        self._meter.collect()


def make_probe(job: Job) -> LossProbe:
    """Return the probe of losses."""
    return LossProbe(shifted=shifts_labels(job.wrapped.module))


def _trained_losses(
    collected: Sequence[MicroBatchLoss], multipliers_M: NDArray[Any], summed_workers: float
) -> dict[str, Content]:
    """Return losses of unknown form, scaled as in the call of backward.

    One over the number of micro-batches makes their sum a mean. Any other constant may belong to
    the loss (a sum over terms or tokens, divided by their number), or not. So it stays in: then
    the mean over micro-batches is the sum of the backward calls' values, and the mean over workers
    is the common trained loss, whether the reduction takes a mean or a sum. A large factor is a
    gradient scaler's, which is no part of the loss.
    """
    count = len(collected)
    losses = []
    multipliers = np.array(multipliers_M, np.float64)
    known = _token_means(collected, multipliers_M, summed_workers)
    for number, micro in enumerate(collected):
        values: NDArray[Any] = micro.values.numpy()
        if micro.constant is not None:
            constant = float(micro.constant.numpy().item())
            share = count * (float(multipliers[number]) if math.isnan(constant) else constant)
            if share and abs(share) < LEAST_SCALER and not math.isclose(share, 1, rel_tol=1e-3):
                values = values * share
                multipliers[number] /= share
            values = values * summed_workers
        losses.append(_packed(values))
    return {**_loss_parts(collected, losses), **known, "multipliers_M": multipliers.tobytes()}


def _token_means(
    collected: Sequence[MicroBatchLoss], multipliers_M: NDArray[Any], summed_workers: float
) -> dict[str, Content]:
    """Return sums over label tokens as means, if their divisor counts all workers' tokens.

    Whether it does follows from all workers' counts together.
    """
    rows = []
    for micro, multiplier in zip(collected, multipliers_M, strict=True):
        if micro.summed is None or micro.constant is None:
            return {}
        count, divisor = (float(number.numpy().item()) for number in micro.summed)
        mean = float(micro.values.numpy().item()) * divisor / count if count else 0.0
        weight = float(multiplier) * summed_workers * count / divisor
        constant = float(micro.constant.numpy().item())
        rows.append((count, divisor / constant if constant else math.nan, mean, weight))
    return {"sums_M4": np.array(rows, np.float64).tobytes()}


def _loss_parts(collected: Sequence[MicroBatchLoss], losses: list[bytes]) -> dict[str, Content]:
    units = typed_array("q", [len(each) // _DOUBLE for each in losses])
    weights = [
        _NAN * count if micro.weights is None else _packed(micro.weights)
        for micro, count in zip(collected, units, strict=True)
    ]
    return {
        "losses_U": b"".join(losses),
        "weights_U": b"".join(weights),
        "units_M": units.tobytes(),
    }


def _packed(numbers: Numbers | NDArray[Any]) -> bytes:
    array = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return array.astype(np.float64, copy=False).tobytes()
