"""The samples that enter the model: their identity, number and lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.bus.probe import Job, MessagePart, Probe, StepEnd
from rankscope.evidence.samples.lengths import LengthMeter, Lengths
from rankscope.evidence.samples.meter import SampleMeter
from rankscope.gradients.host import Numbers
from rankscope.stats.arrays import Ints


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """The samples (ids or digests, in parts) of one step; they may still be on the device."""

    samples: Sequence[Numbers | Ints]
    lengths: Lengths
    values: Mapping[str, float]

    @property
    def ready(self) -> bool:
        """Whether all can be read without waiting."""
        on_their_way = [one for one in self.samples if not isinstance(one, np.ndarray)]
        return self.lengths.ready and all(one.ready for one in on_their_way)

    def read(self) -> MessagePart:
        """Wait for the device."""
        packed = [_packed(one) for one in self.samples]
        return MessagePart({**self.values, **self.lengths.read()}, {"samples_B": b"".join(packed)})


class SampleProbe(Probe):
    """Collects the samples of one worker's steps."""

    def __init__(self) -> None:
        self._samples = SampleMeter()
        self._lengths = LengthMeter()
        self.give = self._samples.give

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Digest the batch, unless the training gave its ids."""
        self._samples.see(args, kwargs, forward)
        self._lengths.see(args, kwargs, forward)

    def collect(self, end: StepEnd) -> PendingSamples:
        """Return the samples of the step's forward passes that had a backward pass."""
        values = {"samples_named": self._samples.named, "micro_batches": end.num_passes or math.nan}
        samples = self._samples.collect(end.idle)
        return PendingSamples(samples, self._lengths.collect(end.idle), values)

    def abort(self) -> None:
        """Forget the step's samples."""
        self._samples.collect()
        self._lengths.collect()


def make_probe(job: Job) -> SampleProbe:
    """Return the probe of samples."""
    return SampleProbe()


def _packed(samples: Numbers | Ints) -> bytes:
    array = samples if isinstance(samples, np.ndarray) else samples.numpy()
    return array.astype(np.int64, copy=False).tobytes()
