"""One worker's step, as capture has collected it, and how it becomes a message."""

import json
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.message import pack_step, pack_values
from rankscope.bus.probe import Content
from rankscope.capture import GradientTransfer
from rankscope.capture.canary.replay import PendingCanary
from rankscope.capture.device_clock import FeltSeconds
from rankscope.capture.host import Numbers
from rankscope.capture.inputs import PendingValues
from rankscope.capture.loss import MicroBatchLoss
from rankscope.capture.state.trace import PendingTrace
from rankscope.capture.state.turn import PendingState
from rankscope.core.arrays import Ints
from rankscope.core.replicas import Trace

_DOUBLE = 8  # bytes
_LEAST_SCALER = 1024.0
_NAN = np.full(1, np.nan).tobytes()


@dataclass(slots=True)
class LocalStep:
    """What capture collected in one step; its numbers may still be on the device.

    Attributes:
        step: Step number.
        gradient: The measured gradient; None when no valid one was measured.
        losses: One entry per micro-batch.
        multipliers: What the losses were multiplied by before backward; None if unknown.
        samples: Ids or digests, in parts.
        inputs: What meters have found in the model's inputs and rollouts.
        values: LOCAL signals that are known already.
        state: Digests of the training's state.
        canary: What the step says of canaries; None if nothing.
        trace: Its tensors, where they are traced.
        time: Unix time at which it ended.
        felt: What it lost to the monitor on an accelerator; None where the host does the work.
        summed_workers: How many workers' gradients the reduction adds up: 1 for their mean.
    """

    step: int
    gradient: GradientTransfer | None
    losses: Sequence[MicroBatchLoss]
    multipliers: Numbers | None
    samples: Sequence[Numbers | Ints]
    inputs: Sequence[PendingValues]
    values: Mapping[str, float]
    state: PendingState
    canary: PendingCanary | None = None
    trace: PendingTrace | None = None
    time: float = field(default_factory=time.time)
    felt: FeltSeconds | None = None
    summed_workers: float = 1.0

    @property
    def ready(self) -> bool:
        """Whether all of its numbers are on the host; the last to arrive are asked first."""
        for part in (self.trace, self.gradient, self.canary, self.multipliers, self.state):
            if part is not None and not part.ready:
                return False
        if self.felt is not None and not self.felt.ready:
            return False
        if not all(each.ready for each in self.inputs):
            return False
        for samples in self.samples:
            if not (isinstance(samples, np.ndarray) or samples.ready):
                return False
        return all(micro.ready for micro in self.losses)

    def pack(self, known_names: set[int] | None, *, gradient: bool = True) -> list[Content]:
        """Wait for the device, and return the message's bytes, in pieces.

        Args:
            known_names: Digests of names that the agent knows already, to be completed; None on
                workers that need not tell any.
            gradient: Whether there is room for the gradient.
        """
        state, known = self.state.read()
        values = {**self.values, **known}
        for each in self.inputs:
            values |= each.read()
        if self.canary is not None:
            values |= self.canary.read()
        if self.felt is not None:
            values["overhead_seconds"] = self.felt.read()
        trace = None if self.trace is None else self.trace.read()
        items = state.items
        names: dict[str, Any] = {}
        if known_names is not None and len(state.names) and items not in known_names:
            known_names.add(items)
            kinds = [str(kind) for kind in state.kinds]
            names["items"] = [[items, kinds, list(state.names)]]
        roles = self.state.roles
        if self.state.changed:
            names["changed"] = list(self.state.changed)
        if roles is not None:
            names["roles"] = roles.to_json(named=known_names is not None)
        parts: dict[str, Content] = {
            "slots": pack_values(values),
            **_losses(self.losses, self.multipliers, self.summed_workers),
            "samples_B": b"".join([_packed(each, np.int64) for each in self.samples]),
            "digests_D": state.digests_D.tobytes(),
            "unchanged_D": state.unchanged_D.tobytes(),
        }
        if self.gradient is not None and gradient:
            parts |= self.gradient.parts()
        if trace is not None:
            names["traced"] = _add_trace(parts, trace)
        if names:
            parts["names"] = json.dumps(names).encode()
        return pack_step(self.step, self.time, items, parts)


def _packed(numbers: Numbers | NDArray[Any], dtype: type[np.generic] = np.float64) -> bytes:
    array = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return array.astype(dtype, copy=False).tobytes()


def _losses(
    collected: Sequence[MicroBatchLoss], multipliers: Numbers | None, summed_workers: float = 1.0
) -> dict[str, Content]:
    """Return losses and weights, one micro-batch after the other, and how many each has."""
    if multipliers is not None and any(micro.constant is not None for micro in collected):
        return _trained_losses(collected, multipliers.numpy(), summed_workers)
    parts = _loss_parts(collected, [_packed(micro.values) for micro in collected])
    if multipliers is not None:
        parts["multipliers_M"] = _packed(multipliers)
    return parts


def _trained_losses(
    collected: Sequence[MicroBatchLoss], multipliers_M: NDArray[Any], summed_workers: float
) -> dict[str, Content]:
    """Return losses of unknown make, as backward was called on them.

    One over the number of micro-batches makes their sum a mean. Any other constant may belong to
    the loss (a sum over terms or tokens, divided by their number), or not. So it stays in: then
    the mean over micro-batches is the sum of what backward was called on, and the mean over workers
    is what they train on together, whether the reduction takes a mean or a sum. A large factor is
    a gradient scaler's, which is no part of it.
    """
    count = len(collected)
    losses, multipliers = [], np.array(multipliers_M, np.float64)
    known = _token_means(collected, multipliers_M, summed_workers)
    for number, micro in enumerate(collected):
        values: NDArray[Any] = micro.values.numpy()
        constant = micro.constant
        if constant is not None:
            share = count * (float(multipliers[number]) if math.isnan(constant) else constant)
            if share and abs(share) < _LEAST_SCALER and not math.isclose(share, 1, rel_tol=1e-3):
                values = values * share
                multipliers[number] /= share
            values = values * summed_workers
        losses.append(_packed(values))
    return {**_loss_parts(collected, losses), **known, "multipliers_M": multipliers.tobytes()}


def _token_means(
    collected: Sequence[MicroBatchLoss], multipliers_M: NDArray[Any], summed_workers: float
) -> dict[str, Content]:
    """Return what sums over label tokens are as means, if their divisor counts all tokens.

    Whether it does, all workers' counts tell together.
    """
    rows = []
    for micro, multiplier in zip(collected, multipliers_M, strict=True):
        if micro.summed is None or micro.constant is None:
            return {}
        count, divisor = (float(number.numpy().item()) for number in micro.summed)
        mean = float(micro.values.numpy().item()) * divisor / count if count else 0.0
        weight = float(multiplier) * summed_workers * count / divisor
        rows.append((count, divisor / micro.constant, mean, weight))
    return {"sums_M4": np.array(rows, np.float64).tobytes()}


def _loss_parts(collected: Sequence[MicroBatchLoss], losses: list[bytes]) -> dict[str, Content]:
    units = array("q", [len(each) // _DOUBLE for each in losses])
    weights = [
        _NAN * count if micro.weights is None else _packed(micro.weights)
        for micro, count in zip(collected, units, strict=True)
    ]
    return {
        "losses_U": b"".join(losses),
        "weights_U": b"".join(weights),
        "units_M": units.tobytes(),
    }


def _add_trace(message: dict[str, Content], trace: Trace) -> dict[str, Any]:
    """Put a trace into a message; what the model held before comes first. Return the names."""
    parts = [part for part in (trace.initial, trace) if part is not None]
    message["traced_digests_N"] = b"".join([_packed(part.digests_N, np.int64) for part in parts])
    message["traced_norms_N"] = b"".join([_packed(part.norms_N) for part in parts])
    message["traced_sketches"] = b"".join([_packed(part.sketches_NK, np.float32) for part in parts])
    return {
        what: [[str(kind) for kind in part.kinds], list(part.names)]
        for what, part in (("initial", trace.initial), ("own", trace))
        if part is not None
    }
