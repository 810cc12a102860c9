"""One worker's step, as capture has collected it, and how it becomes a message."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.agent.message import StepMessage, pack_values
from rankscope.capture import GradientHandover, HostCopy
from rankscope.capture.canary import PendingCanary
from rankscope.capture.host import Numbers
from rankscope.capture.loss import MicroBatchLoss, to_arrays
from rankscope.capture.samples import to_array
from rankscope.capture.state_turn import PendingState
from rankscope.capture.trace import PendingTrace
from rankscope.core.arrays import Ints
from rankscope.core.trace import Trace


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
        time: Unix time at which it ended.
    """

    step: int
    gradient: GradientHandover | None
    losses: Sequence[MicroBatchLoss]
    multipliers: Numbers | None
    samples: Sequence[HostCopy | Ints]
    values: Mapping[str, float]
    state: PendingState
    canary: PendingCanary | None = None
    trace: PendingTrace | None = None
    time: float = field(default_factory=time.time)

    @property
    def ready(self) -> bool:
        """Whether all of its numbers are on the host."""
        return all(part.ready for part in self._parts())

    def _parts(self) -> Iterator[Any]:
        """Yield what may still be on its way, the last to arrive first."""
        yield from (p for p in (self.trace, self.gradient, self.canary, self.multipliers) if p)
        yield self.state
        yield from (samples for samples in self.samples if not isinstance(samples, np.ndarray))
        for micro in self.losses:
            yield from (copy for copy in (micro.values, micro.weights) if copy is not None)

    def to_message(self, known_names: set[int] | None) -> StepMessage:
        """Wait for the device, and return the message.

        Args:
            known_names: Digests of names that the agent knows already, to be completed; None on
                workers that need not tell any.
        """
        losses, weights = to_arrays(self.losses)
        state, state_values = self.state.read()
        samples = to_array(self.samples)
        values = {**self.values, **state_values, **_sample_values(samples)}
        if self.canary is not None:
            values |= self.canary.read()
        trace = None if self.trace is None else self.trace.read()
        names: dict[str, Any] = {}
        if known_names is not None and len(state.names) and state.items not in known_names:
            known_names.add(state.items)
            kinds = [str(kind) for kind in state.kinds]
            names["items"] = [[state.items, kinds, list(state.names)]]
        message = StepMessage(
            step=self.step,
            time=self.time,
            items=state.items,
            slots=pack_values(values),
            losses_U=np.concatenate(losses) if losses else np.empty(0),
            weights_U=np.concatenate(weights) if weights else np.empty(0),
            units_M=np.array([len(each) for each in losses], np.int64),
            samples_B=samples,
            digests_D=state.digests_D,
            unchanged_D=state.unchanged_D.astype(np.uint8),
        )
        if self.multipliers is not None:
            message.multipliers_M = np.asarray(self.multipliers.numpy(), np.float64)
        if self.gradient is not None:
            self.gradient.fill(message)
        if trace is not None:
            names["traced"] = _fill_trace(message, trace)
        if names:
            message.names = np.frombuffer(json.dumps(names).encode(), np.uint8)
        return message


def _fill_trace(message: StepMessage, trace: Trace) -> dict[str, Any]:
    """Put a trace into a message; what the model held before comes first. Return the names."""
    parts = [part for part in (trace.initial, trace) if part is not None]
    message.traced_digests_N = np.concatenate([part.digests_N for part in parts])
    message.traced_norms_N = np.concatenate([part.norms_N for part in parts])
    message.traced_sketches = np.concatenate([part.sketches_NK.ravel() for part in parts])
    return {
        what: [[str(kind) for kind in part.kinds], list(part.names)]
        for what, part in (("initial", trace.initial), ("own", trace))
        if part is not None
    }


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
