"""One step of one worker on its way from device to message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.capture import HostCopy
from rankscope.capture.loss import MicroBatchLoss, to_arrays
from rankscope.capture.samples import to_array
from rankscope.core.nulls import weighted_mean_and_sem
from rankscope.core.step import Floats, Ints
from rankscope.exchange.payload import WorkerStep


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What capture collected in one step; its numbers may still be on the device.

    Attributes:
        step: Step number.
        sketch: float32 ``[k]``; None when no valid gradient was measured.
        squared_norm: float64 scalar, beside ``sketch``.
        losses: One entry per micro-batch.
        samples: Ids or digests, in parts.
        values: LOCAL signals that are known already.
    """

    step: int
    sketch: HostCopy | None
    squared_norm: HostCopy | None
    losses: Sequence[MicroBatchLoss]
    samples: Sequence[HostCopy | Ints]
    values: Mapping[str, float]

    def to_message(self) -> WorkerStep:
        """Wait for the device and return the message; for the courier's thread."""
        losses, weights = to_arrays(self.losses)
        samples = to_array(self.samples)
        sketch = None if self.sketch is None else np.asarray(self.sketch.numpy(), np.float32)
        values = {**self.values, **_loss_values(losses, weights), **_sample_values(samples)}
        if self.squared_norm is not None:
            values["grad_norm"] = float(np.sqrt(self.squared_norm.numpy()))
        values["nonfinite"] = not _all_finite(sketch) or not all(map(_all_finite, losses))
        micro = [
            _loss_values([loss], [weight]) for loss, weight in zip(losses, weights, strict=True)
        ]
        return WorkerStep(
            step=self.step,
            values=values,
            sketch=sketch,
            samples=samples,
            micro_losses=np.array([part["loss"] for part in micro], np.float64),
            micro_weights=np.array([part["loss_weight"] for part in micro], np.float64),
        )


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


def _all_finite(values: NDArray[np.floating] | None) -> bool:
    return values is None or bool(np.isfinite(values).all())
