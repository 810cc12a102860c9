"""One step of one worker on its way from device to message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.capture import GradientHandover, HostCopy
from rankscope.capture.canary import PendingCanary
from rankscope.capture.loss import MicroBatchLoss, to_arrays
from rankscope.capture.samples import to_array
from rankscope.capture.state_meter import PendingState
from rankscope.capture.trace import PendingTrace
from rankscope.core.arrays import Floats, Ints
from rankscope.core.nulls import weighted_mean_and_sem
from rankscope.exchange.payload import WorkerStep


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What capture collected in one step; its numbers may still be on the device.

    Attributes:
        step: Step number.
        gradient: The measured gradient; None when no valid one was measured.
        losses: One entry per micro-batch.
        multipliers: What the losses were multiplied by before backward; None if unknown.
        samples: Ids or digests, in parts.
        values: LOCAL signals that are known already.
        state: Digests of the training's state.
        canary: What the step says of canaries; None if nothing.
        trace: Its tensors, where they are traced.
    """

    step: int
    gradient: GradientHandover | None
    losses: Sequence[MicroBatchLoss]
    multipliers: HostCopy | None
    samples: Sequence[HostCopy | Ints]
    values: Mapping[str, float]
    state: PendingState
    canary: PendingCanary | None = None
    trace: PendingTrace | None = None

    def to_message(self) -> WorkerStep:
        """Wait for the device and return the message; for the courier's thread."""
        losses, weights = to_arrays(self.losses)
        samples = to_array(self.samples)
        state, state_values = self.state.read()
        loss_values = _loss_values(losses, weights)
        values = {**self.values, **state_values, **loss_values, **_sample_values(samples)}
        if self.canary is not None:
            values |= self.canary.read()
        multipliers = np.empty(0)
        if self.multipliers is not None:
            multipliers = np.asarray(self.multipliers.numpy(), np.float64)
        if len(multipliers):
            values["grad_scale"] = float(multipliers.sum())
        gradient, micro_norms = None, np.empty(0)
        if self.gradient is not None:
            measured = self.gradient.read()
            if measured.values["grad_carried_over"]:
                values["grad_carried_over"] = True
            else:
                values |= measured.values
                gradient, micro_norms = measured.gradient, measured.micro_norms
        values["nonfinite"] = values.get("grad_nonfinite", 0) > 0 or not all(map(_finite, losses))
        parts = _each_micro(losses, weights, loss_values)
        return WorkerStep(
            step=self.step,
            values=values,
            gradient=gradient,
            samples=samples,
            micro=_micro(parts, micro_norms, multipliers),
            state=state,
            trace=None if self.trace is None else self.trace.read(),
        )


def _each_micro(
    losses: Sequence[Floats], weights: Sequence[Floats], together: Mapping[str, float]
) -> list[Mapping[str, float]]:
    """Return the loss values of each micro-batch, of a single one those of the step."""
    if len(losses) == 1:
        return [together]
    return [_loss_values([loss], [weight]) for loss, weight in zip(losses, weights, strict=True)]


def _micro(parts: Sequence[Mapping[str, float]], norms_M: Floats, multipliers_M: Floats) -> Floats:
    """Return loss, weight, gradient norm and multiplier of each micro-batch ``[4, M]``."""
    micro = np.full((4, max(len(parts), len(norms_M))), np.nan)
    micro[0, : len(parts)] = [part["loss"] for part in parts]
    micro[1, : len(parts)] = [part["loss_weight"] for part in parts]
    micro[2, : len(norms_M)] = norms_M
    if len(multipliers_M) == len(parts):
        micro[3, : len(parts)] = multipliers_M
    return micro


def _loss_values(losses: Sequence[Floats], weights: Sequence[Floats]) -> dict[str, float]:
    """Return loss, its weight, and its standard error, from units given in parts."""
    if not losses:
        return {}
    losses_U, weights_U = np.concatenate(losses), np.concatenate(weights)
    loss, sem = weighted_mean_and_sem(losses_U, weights_U)
    return {"loss": loss, "loss_sem": sem, "loss_weight": float(weights_U.sum())}


def _sample_values(samples: Ints) -> dict[str, float]:
    if len(samples) == 0:
        return {"num_samples": 0}
    return {"num_samples": len(samples), "batch_digest": int(_mix(samples).sum())}


def _mix(samples: Ints) -> Ints:
    """Spread ids over 64 bits (the finaliser of SplitMix64), so that their sums tell sets apart."""
    bits = samples.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


def _finite(values: NDArray[np.floating]) -> bool:
    return bool(np.isfinite(values).all())
