"""The detector of random generators that a restarted job restores on other ranks, or not at all.

Legend of shapes: W workers.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind, copied_values
from rankscope.bus.steps import Step
from rankscope.bus.words import listed, name_ranks
from rankscope.evidence.randomness import BETWEEN_BITS, GENERATORS, KEY
from rankscope.stats.arrays import Ints

RESUMED = "rng.resume_mismatch"
AGAIN = "rng-begun-again"

_MOST_SAVED = 64


class RandomRestart(Detector):
    """A restarted job in which ranks hold the random states of others.

    Each rank had a state of its own when the run began, and when it was saved. After the restart,

    - some rank holds exactly the state that another had saved, in place of its own, or
    - all ranks hold one and the same state, whoever's that is.

    - A note: all ranks hold the states with which the run began, of generators that it moves.

    States that never moved before count for nothing: nobody draws from them.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._ended = False
        self._first: dict[str, Ints] = {}
        self._moved = 0  # generators that the steps move, as bits
        self._saved: deque[dict[str, Ints]] = deque(maxlen=_MOST_SAVED)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what a restarted job has restored."""
        used_W = step.gathered.workers["rng_used"]
        if (used_W > 0).any():
            bits = int(np.bitwise_or.reduce(used_W[used_W > 0]))
            self._moved |= bits | bits >> BETWEEN_BITS
        rows = step.gathered.differences
        if self._num_workers < 2 or not rows:
            return
        started = held_values(rows, StateKind.STARTED, KEY)
        if started:
            continues, self._ended = self._ended and bool(self._first), False
            found = self._compare(started) if continues else {}
            if found:
                yield _evidence(step.gathered.step, found)
            again = self._begun_again(started) if continues and not found else []
            if again:
                yield _begun_again(step.gathered.step, again, self._num_workers)
            if not continues:
                self._first = started
        saved = held_values(rows, StateKind.SAVED, KEY)
        if saved:
            self._saved.append(saved)

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; a session that begins after this is a restarted job's."""
        self._ended = True
        return ()

    def _compare(self, now: Mapping[str, Ints]) -> dict[str, tuple[str, list[int]]]:
        """Return words and ranks for each generator that is not where it belongs."""
        found = {}
        for name, now_W in now.items():
            first_W = self._first.get(name)
            if first_W is None or not _all_differ(first_W):
                continue
            seen = self._seen(name, first_W, now_W)
            if seen is not None:
                found[name] = seen
        return found

    def _begun_again(self, now: Mapping[str, Ints]) -> list[str]:
        """Return the generators that are in their first states, and that the steps had moved."""
        names = [name for bit, name in GENERATORS.items() if self._moved & bit and name in now]
        return [name for name in names if np.array_equal(now[name], self._first.get(name, ()))]

    def _seen(self, name: str, first_W: Ints, now_W: Ints) -> tuple[str, list[int]] | None:
        moved = [one[name] for one in self._saved if name in one and (one[name] != first_W).all()]
        for saved_W in moved:
            wrong = np.flatnonzero(now_W != saved_W).tolist()
            words = copied_values(now_W, saved_W, wrong) if wrong else ""
            if words:
                return words, wrong
        if moved and (now_W == now_W[0]).all():
            ranks = list(range(len(now_W)))
            return f"{name_ranks(ranks)} hold one and the same", ranks
        return None


def _all_differ(values_W: Ints) -> bool:
    return len(np.unique(values_W)) == len(values_W)


def _evidence(step: int, found: Mapping[str, tuple[str, list[int]]]) -> FaultEvidence:
    generators = list(found)
    words, ranks = found[generators[0]]
    return FaultEvidence(
        cause=RESUMED,
        severity=Severity.WARNING,
        ranks=tuple(ranks),
        first_step=step,
        last_step=step,
        count=1,
        fields={
            "words": words,
            "Words": words[:1].upper() + words[1:],
            "generators": listed(generators),
            "start": f"{step:,}",
        },
        numbers={"generators": generators, "words": words},
    )


def _begun_again(step: int, generators: list[str], num_workers: int) -> FaultEvidence:
    return FaultEvidence(
        cause=RESUMED,
        key=AGAIN,
        severity=Severity.NOTE,
        ranks=tuple(range(num_workers)),
        first_step=step,
        last_step=step,
        count=1,
        fields={"generators": listed(generators), "start": f"{step:,}"},
        numbers={"generators": generators},
    )
