"""The detector of epochs that all have the same order.

A sampler that is not told the epoch deals the same batches in the same order again and again. No
worker differs from another then, and no metric of a single step shows it.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from rankscope.core.finding import Severity
from rankscope.core.order import PeriodFinder, ShortCycles
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence, Observation
from rankscope.diagnose.rules import count

FEW = 16
"""Batches that are repeated on purpose, in a test whether the model can learn them by heart."""

_LEAST_STEPS = 8
_SHARE = 4  # of a period must have come again


class RepeatedOrder(Stateful):
    """The batches of all workers come again in the same order.

    A step's batch is known by the digests of all workers' batches in the order of ranks. It must
    have come before with one constant period, in 8 steps in a row and in a quarter of the period.
    So a single batch that comes twice proves nothing. Exact for periods up to 2^19 steps.

    Steps are not compared across a restart: a job that begins again from an older checkpoint
    repeats some of them, as it should.

    Args:
        num_workers: W.
        repeats: Whether the training means to repeat its batches.
    """

    SETTINGS = ("_intended",)

    def __init__(self, num_workers: int, repeats: bool = False) -> None:
        self._intended = repeats
        self._finder = PeriodFinder()
        self._cycles = ShortCycles(num_workers, FEW - 1)
        self._ended = False
        self._on_purpose = 0
        self._first = self._last = self._period = -1
        self._count = 0
        self._severity = Severity.NOTE

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take the batches of one step; speaks while they come again in the same order."""
        gathered = step.gathered
        digests_W = gathered.workers["batch_digest"]
        if self._ended:
            self.restarted(gathered.step)
        if not step.some_known("batch_digest"):
            return ()
        self._on_purpose = self._on_purpose + 1 if self._cycles.observe(digests_W) else 0
        finder = self._finder
        finder.observe(gathered.step, _digest(digests_W))
        if finder.run < max(_LEAST_STEPS, finder.period / _SHARE):
            return ()
        few = finder.period < FEW or self._on_purpose >= finder.run
        severity = Severity.NOTE if few or self._intended else Severity.WARNING
        if not self._count or severity > self._severity:
            self._first, self._period = finder.first, finder.period
            self._severity, self._count = severity, 0
        self._count = self._count + 1 if self._count else finder.run
        self._last = gathered.step
        return (self._evidence(),)

    def close(self) -> Iterable[Evidence]:
        """End the run; a step after this is one of a restarted job."""
        self._ended = True
        return ()

    def restarted(self, step: int) -> None:
        """Take ``step`` as the first one of a restarted job."""
        self._ended = False
        self._on_purpose = 0
        self._finder.restart(step)

    def _evidence(self) -> Evidence:
        return Evidence(
            cause="data.repeated_order",
            severity=self._severity,
            ranks=(),
            first_step=self._first,
            last_step=self._last,
            count=self._count,
            fields={
                "first": f"{self._first:,}",
                "before": f"{self._first - self._period:,}",
                "period": count(self._period, "step"),
                "steps": count(self._count, "step"),
            },
            numbers={"period": self._period, "repeated_steps": self._count},
        )


def _digest(digests_W: np.typing.NDArray[np.int64]) -> int:
    """Return one digest of all workers' batches, in the order of ranks."""
    digest = hashlib.blake2b(np.ascontiguousarray(digests_W).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
