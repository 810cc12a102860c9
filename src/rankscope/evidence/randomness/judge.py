"""The detector of shared random numbers."""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.bus.detector import (
    Detector,
    FaultEvidence,
    PersistentFault,
    RestartDetector,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.plan import Plan
from rankscope.bus.replicas import (
    StateKind,
    copied_values,
    known_values,
    minority_ranks,
    ranks_by,
)
from rankscope.bus.steps import RankGroups, SharedWork, Step
from rankscope.bus.words import listed, name_ranks, shortened
from rankscope.evidence.randomness import BETWEEN_BITS, DIGESTS, GENERATORS, KEY
from rankscope.stats.arrays import MISSING_INT, Bools, Ints

STEPS_NEEDED = 3

IDENTICAL = "rng.identical"
DIFFERS = "rng.differs"
BETWEEN = "rng-identical-between"
DIFFERS_BETWEEN = "rng-differs-between"
LOADERS = "loader-rng-identical"
PRIVATE = "private-rng-identical"

_MOST_GROUPS = 4
_OF_LOADERS = {
    "loader_rng_python": (1, "Python's"),
    "loader_rng_numpy": (2, "numpy's"),
    "loader_rng_torch": (4, "torch's"),
}


class EqualRandom(Detector):
    """Workers that draw the same random numbers; by plan, those that draw different ones.

    - Forward passes of several workers that start from equal states of a generator that they move.
      A note: equal dropout masks on different data cost little, and many scripts seed all ranks
      alike. Generators that never move do not count. A warning where ranks fall into groups that
      draw alike on other batches: their seed leaves out a part of the rank. Not where the forward
      pass exchanges tensors: groups with parts of the same sequences are often seeded alike.
    - The same of generators that move between the forward passes of two steps. A warning:
      augmentation and sampling draw there. Not of workers that share the work on each sample.
    - Private generators of modules and data sets that move. A note: a data set may shuffle alike on
      all ranks before it is divided.
    - Processes of data loaders that start from equal states of a generator that they use, in one
      rank or in several.
    """

    SETTINGS = ("_num_workers", "_same")

    def __init__(self, num_workers: int, plan: Plan | None = None) -> None:
        self._num_workers = num_workers
        self._same = plan is not None and plan.random == "same"
        self._forward = PersistentFault(STEPS_NEEDED)
        self._between = PersistentFault(STEPS_NEEDED, in_a_row=True)
        self._used = self._used_between = 0
        self._began_apart: dict[str, bool] = {}  # by generator, as it was first used
        self._sizes_differ = False  # whether batches had other sizes in some step
        self._groups: list[tuple[int, ...]] = []  # that draw alike, where not all workers do
        self._exchanges = False  # tensors in the forward pass
        self._loaders = PersistentFault(STEPS_NEEDED)
        self._private = PersistentFault(STEPS_NEEDED)
        self._shared = 0
        self._sharing = SharedWork()
        self._inside: set[int] = set()
        self._across: set[int] = set()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report shared random numbers, and their end."""
        workers = step.gathered.workers
        number = step.gathered.step
        sharing = bool(self._sharing.observe(step))
        kinds = (row.kind for row in step.gathered.differences)
        self._exchanges = self._exchanges or StateKind.EXCHANGED in kinds
        if self._num_workers > 1 and step.some_known("rng_used"):
            yield from self._see_generators(number, workers, step.identical, sharing=sharing)
        if self._num_workers > 1 and step.some_known("rng_private") and not self._same:
            seen = self._private
            digests_W = workers["rng_private"]
            if seen.observe(number, _sharing(digests_W, digests_W != MISSING_INT)):
                numbers = {"steps": seen.count}
                yield seen.evidence(IDENTICAL, Severity.NOTE, seen.ranks, {}, numbers, key=PRIVATE)
        if step.some_known("loader_rng_repeats") and self._see_loaders(number, workers):
            yield self._loader_evidence()

    def _see_generators(
        self, step: int, workers: Mapping[str, Ints], identical: RankGroups, *, sharing: bool
    ) -> Iterable[FaultEvidence]:
        used_W = np.maximum(workers["rng_used"], 0)
        for size_W in (workers["num_samples"], workers["sequence_length"]):
            known = size_W[np.isfinite(size_W)]
            self._sizes_differ |= bool((known != known[:1]).any())
        forward: set[int] = set()
        between: set[int] = set()
        for name, bits in DIGESTS.items():
            digests_W = workers[name]
            moved_W = (used_W & (bits | bits << BETWEEN_BITS)) != 0
            if not moved_W.any():
                continue
            moved_W &= digests_W != MISSING_INT
            known = digests_W[moved_W]
            self._began_apart.setdefault(name, bool((known != known[:1]).any()))
            if self._same:
                ranks = minority_ranks(known_values(digests_W, moved_W))
            else:
                ranks = _sharing(digests_W, moved_W)
                groups = _groups(digests_W, moved_W & (used_W & bits != 0))
                if groups and not set(groups) & set(identical):
                    self._groups = groups
            forward.update(rank for rank in ranks if used_W[rank] & bits)
            between.update(rank for rank in ranks if used_W[rank] & bits << BETWEEN_BITS)
            for rank in ranks:
                self._used |= int(used_W[rank]) & bits
                self._used_between |= int(used_W[rank]) >> BETWEEN_BITS & bits
        if self._forward.observe(step, forward):
            explained = self._sizes_differ and not any(self._began_apart.values())
            by_plan = self._same and not explained
            apart = self._groups and not self._exchanges
            severity = Severity.WARNING if by_plan or apart else Severity.NOTE
            yield self._evidence(self._forward, self._used, "", severity)
        if self._between.observe(step, () if sharing else between):
            key = DIFFERS_BETWEEN if self._same else BETWEEN
            yield self._evidence(self._between, self._used_between, key)

    def _see_loaders(self, step: int, workers: Mapping[str, Ints]) -> bool:
        repeats_W = workers["loader_rng_repeats"]
        inside = np.flatnonzero(repeats_W > 0).tolist()
        for rank in inside:
            self._shared |= int(repeats_W[rank])
        ranks = set(inside)
        for name, (bit, _) in _OF_LOADERS.items():
            digests_W = workers[name]
            across = _sharing(digests_W, digests_W != MISSING_INT)
            if across and not self._same:
                self._shared |= bit
                self._across.update(across)
                ranks.update(across)
        self._inside.update(inside)
        return self._loaders.observe(step, ranks)

    def _evidence(
        self, seen: PersistentFault, used: int, key: str, severity: Severity = Severity.WARNING
    ) -> FaultEvidence:
        generators = [name for bit, name in GENERATORS.items() if used & bit]
        return seen.evidence(
            DIFFERS if self._same else IDENTICAL,
            severity,
            seen.ranks,
            {
                "generators": listed(generators),
                "groups": shortened(
                    [name_ranks(one) for one in self._groups or [tuple(seen.ranks)]], _MOST_GROUPS
                ),
            },
            {"steps": seen.count, "generators": generators, "groups": self._groups[:16]},
            key=key,
        )

    def _loader_evidence(self) -> FaultEvidence:
        generators = [name for bit, name in _OF_LOADERS.values() if self._shared & bit]
        where = [f"several processes of {name_ranks(self._inside)}"] if self._inside else []
        if self._across:
            where.append(f"{name_ranks(self._across)} among each other")
        return self._loaders.evidence(
            IDENTICAL,
            Severity.WARNING,
            self._loaders.ranks,
            {"generators": listed(generators), "where": " and ".join(where)},
            {
                "steps": self._loaders.count,
                "generators": generators,
                "alike_inside": sorted(self._inside),
                "alike_across": sorted(self._across),
            },
            key=LOADERS,
        )


def _groups(values_W: Ints, known_W: Bools) -> list[tuple[int, ...]]:
    """Return the groups of workers with the same value, if there are several of one size."""
    _, counts = np.unique(values_W[known_W], return_counts=True)
    if len(counts) < 2 or counts[0] == 1 or (counts != counts[0]).any():
        return []
    return [tuple(ranks) for ranks in ranks_by(known_values(values_W, known_W)).values()]


def _sharing(values_W: Ints, known_W: Bools) -> tuple[int, ...]:
    """Return the workers whose value another worker has as well."""
    ranks = np.flatnonzero(known_W)
    ordered = np.sort(values_W[ranks])
    if not (ordered[1:] == ordered[:-1]).any():
        return ()
    _, inverse, counts = np.unique(values_W[ranks], return_inverse=True, return_counts=True)
    return tuple(ranks[counts[inverse] > 1].tolist())


UNUSED = "rng-unused"
_STEPS_UNUSED = 24


class UnusedRandom(Detector):
    """Workers that draw no random number where others do, in 24 steps in a row.

    In the forward pass, or between the passes, where augmentation draws. At most half of the
    workers count as idle. A note where they are half of them: either half may be right. Not where
    all drew in the forward passes before.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._idle = [PersistentFault(_STEPS_UNUSED, in_a_row=True) for _ in (0, BETWEEN_BITS)]
        self._used = [0, 0]  # generators that the others moved
        self._steps_of_all = 0  # in whose forward pass all drew

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report workers that draw nothing, and their end."""
        if self._num_workers < 2 or not step.all_known("rng_used"):
            return
        used_W = step.gathered.workers["rng_used"]
        for place, (span, shift) in enumerate(zip(self._idle, (0, BETWEEN_BITS), strict=True)):
            moved_W = used_W >> shift & (1 << BETWEEN_BITS) - 1
            idle = np.flatnonzero(moved_W == 0).tolist()
            some = 2 * len(idle) <= self._num_workers
            self._steps_of_all += place == 0 and not idle
            if some and idle:
                self._used[place] = int(np.bitwise_or.reduce(moved_W))
            if span.observe(step.gathered.step, idle if some else ()):
                yield self._evidence(place)

    def _evidence(self, place: int) -> FaultEvidence:
        span = self._idle[place]
        generators = [name for bit, name in GENERATORS.items() if self._used[place] & bit]
        stopped = place == 0 and self._steps_of_all >= STEPS_NEEDED
        return span.evidence(
            DIFFERS,
            Severity.WARNING if stopped else span.severity(self._num_workers),
            span.ranks,
            {
                "where": ("in the forward pass", "between forward passes")[place],
                "what": ("dropout or noise", "augmentation or sampling")[place],
                "generators": listed(generators),
                "over": "" if span.open else " They do again.",
            },
            {"steps": span.count, "generators": generators},
            key=(UNUSED, f"{UNUSED}-between")[place],
        )


RESUMED = "rng.resume_mismatch"
AGAIN = "rng-begun-again"

_MOST_SAVED = 64


class RandomRestart(RestartDetector):
    """A restarted job in which ranks hold the random states of others.

    Each rank had a state of its own when the run began, and when it was saved. After the restart,

    - some rank holds exactly the state that another had saved, in place of its own, or
    - all ranks hold one and the same state, whoever's that is.

    - A note: all ranks hold the states with which the run began, of generators that it moves.

    States that never moved before count for nothing: nobody draws from them.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        super().__init__()
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
            continues = self._restarts() and bool(self._first)
            found = self._compare(started) if continues else {}
            if found:
                words, ranks = next(iter(found.values()))
                more = {"words": words, "Words": words[:1].upper() + words[1:]}
                yield _restarted(step, Severity.WARNING, ranks, list(found), more)
            again = self._begun_again(started) if continues and not found else []
            if again:
                everyone = range(self._num_workers)
                yield _restarted(step, Severity.NOTE, everyone, again, {}, key=AGAIN)
            if not continues:
                self._first = started
        saved = held_values(rows, StateKind.SAVED, KEY)
        if saved:
            self._saved.append(saved)

    def _compare(self, now: Mapping[str, Ints]) -> dict[str, tuple[str, list[int]]]:
        """Return words and ranks for each generator that is not where it belongs."""
        found = {}
        for name, now_W in now.items():
            first_W = self._first.get(name)
            if first_W is None or len(np.unique(first_W)) < len(first_W):
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


def _restarted(
    step: Step,
    severity: Severity,
    ranks: Iterable[int],
    generators: list[str],
    words: Mapping[str, str],
    *,
    key: str = "",
) -> FaultEvidence:
    """Return what shows in the first step after a restart as evidence."""
    at = step.gathered.step
    fields = {**words, "generators": listed(generators), "start": f"{at:,}"}
    numbers: dict[str, object] = {"generators": generators}
    if "words" in words:
        numbers["words"] = words["words"]
    return evidence_at(at, RESUMED, severity, ranks, fields, numbers, key=key)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    workers = run.num_workers
    return EqualRandom(workers, run.plan), UnusedRandom(workers), RandomRestart(workers)
