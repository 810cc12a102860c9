"""The samples that the workers have drawn, together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.judge import Columns, Combiner, Derived, Message
from rankscope.bus.layout import Layout
from rankscope.bus.step import MISSING_INT, GatheredStep
from rankscope.stats.arrays import Ints


class Samples(Combiner):
    """Samples of all workers."""

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Fill in each worker's number of samples and their digest; return the samples."""
        samples_W = tuple(message.samples_B for message in messages_W)
        _fill_samples(columns, samples_W)
        return {"samples": samples_W}


def make_combiner(layout: Layout) -> Samples:
    """Return the combiner of samples."""
    return Samples()


def _fill_samples(columns: Columns, samples_W: Sequence[Ints]) -> None:
    """Fill in each worker's number of samples, and their digest, whatever their order."""
    spread = _mix(np.concatenate(samples_W))
    end = 0
    for rank, samples in enumerate(samples_W):
        begin = end
        end = end + len(samples)
        columns["num_samples"][rank] = len(samples)
        if len(samples):
            columns["batch_digest"][rank] = spread[begin:end].sum()


def _mix(samples: Ints) -> Ints:
    """Spread ids over 64 bits (the finaliser of SplitMix64), so that sums of sets differ."""
    bits = samples.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


def derive(gathered: GatheredStep) -> Derived:
    """Return how many samples were drawn, and how many of them differ.

    Some of a worker's samples may be unknown, when it drew more than a message holds. Then the
    number of distinct ones is unknown too.
    """
    known = sum(len(samples) for samples in gathered.samples)
    drawn = int(_num_samples(gathered).sum())
    if drawn == 0:
        return Derived({"samples_drawn": np.nan, "samples_distinct": np.nan})
    distinct = _num_distinct(np.concatenate(gathered.samples)) if known == drawn else np.nan
    return Derived({"samples_drawn": float(drawn), "samples_distinct": distinct})


def _num_distinct(values: NDArray[np.int64]) -> float:
    ordered = np.sort(values)
    return float(1 + np.count_nonzero(ordered[1:] != ordered[:-1]))


def _num_samples(gathered: GatheredStep) -> NDArray[np.int64]:
    """Return how many samples each worker drew ``[W]``: its own count, or at least those named."""
    named_W = np.array([len(samples) for samples in gathered.samples], np.int64)
    sent_W = gathered.workers["num_samples"]
    return np.maximum(named_W, np.where(sent_W == MISSING_INT, 0, sent_W))
