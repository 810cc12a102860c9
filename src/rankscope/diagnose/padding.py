"""Recognises samples that a sampler repeats at an epoch's end: so all workers have as many.

It is no fault, but it explains repeats that somebody may find in the record.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from rankscope.core.arrays import Ints
from rankscope.core.finding import Severity
from rankscope.core.samples import SampleCounts, flat_samples
from rankscope.core.sorted_map import count_common, in_order
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import count

KEY = "padding-duplicates"

_NONE = np.empty(0, np.int64)


class Padding(Stateful):
    """Looks at the end of the first epoch, where repeats begin.

    A step with some new samples and a few repeats is padded if no step before it repeats any, the
    next one draws nothing new, so a new epoch has begun, and the repeats are fewer than workers,
    or all come from the epoch's first step.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._start = _NONE
        self._looking = num_workers > 1
        self._repeats = 0
        self._step = -1

    def observe(
        self, step: int, counts: SampleCounts, batches: Sequence[Ints]
    ) -> Iterable[Evidence]:
        """Take one step; speaks once, after the first epoch's end.

        Args:
            step: Its number.
            counts: What it draws.
            batches: Samples of each worker.
        """
        if not self._looking or not counts.drawn:
            return ()
        if self._repeats:
            self._looking, self._start = False, _NONE
            return () if counts.new else (self._evidence(),)
        repeats = counts.drawn - counts.new
        if repeats:
            few = repeats < self._num_workers
            of_the_start = count_common(flat_samples(batches), self._start) == repeats
            self._looking = counts.new > 0 and (few or of_the_start)
            self._repeats, self._step = repeats, step
        if not len(self._start):
            self._start = in_order(flat_samples(batches))
        return ()

    def _evidence(self) -> Evidence:
        return Evidence(
            cause="data.overlapping_shards",
            severity=Severity.NOTE,
            ranks=(),
            first_step=self._step,
            last_step=self._step,
            count=1,
            fields={"step": f"{self._step:,}", "repeats": count(self._repeats, "sample")},
            numbers={"repeated": self._repeats},
            key=KEY,
        )
