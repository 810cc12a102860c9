"""The samples that the workers have drawn, together."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.bus.messages import Columns, Combiner, Derived, Layout, Messages
from rankscope.bus.step import MISSING_INT, GatheredStep
from rankscope.stats.arrays import Ints, Ragged
from rankscope.stats.draws import in_order


class Samples(Combiner):
    """Samples of all workers."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in each worker's number of samples and their digest; return the samples."""
        samples = messages["samples_B"]
        _fill_samples(columns, samples)
        return {"samples": samples.rows}


def make_combiner(layout: Layout) -> Samples:
    """Return the combiner of samples."""
    return Samples()


def _fill_samples(columns: Columns, samples: Ragged) -> None:
    """Fill in each worker's number of samples, and their digest, whatever their order."""
    columns["num_samples"][:] = samples.lengths_R
    some_W = samples.lengths_R > 0
    sums_W = Ragged(_mix(samples.flat), samples.lengths_R).reduced(np.add, 0)
    columns["batch_digest"][some_W] = sums_W[some_W]


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
    named_W = np.array([*map(len, gathered.samples)], np.int64)
    sent_W = gathered.workers["num_samples"]
    drawn = int(np.maximum(named_W, np.where(sent_W == MISSING_INT, 0, sent_W)).sum())
    if drawn == 0:
        return Derived({"samples_drawn": np.nan, "samples_distinct": np.nan})
    whole = named_W.sum() == drawn
    distinct = float(len(in_order(np.concatenate(gathered.samples)))) if whole else np.nan
    return Derived({"samples_drawn": float(drawn), "samples_distinct": distinct})
