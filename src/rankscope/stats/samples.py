"""Counts of drawn samples: duplicates inside a step, and repeats over steps.

A sample is an int64: an id, or a digest of its content. Legend of shapes: S steps, W workers, D
draws, U different samples, P different pairs of a sample and the worker that draws it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Bools, Ints, mix
from rankscope.stats.draws import (
    MAX_HALVINGS,
    DrawnSamples,
    Draws,
    SampleShare,
    SortedMap,
    differs_from_previous,
)
from rankscope.stats.state import Stateful

SURE = 1e-6
LIKELY = 1e-4
"""Probabilities of the innocent reading below which an overlap is an error, or a warning."""

MAX_SHARED_PAIRS = 64
"""Pairs of workers that :class:`SampleCounts` lists at most."""

_MAX_LINKS = 1 << 14
_FURTHER_OWNERS = 3
_HIGH = ~np.uint64((1 << (64 - MAX_HALVINGS)) - 1)
_LOW = ~_HIGH
_NONE = np.empty(0, np.int64)
_SPREAD = np.int64(-0x2917_1479_9A96_026D)


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """The samples that one step drew, counted.

    A worker that draws a sample twice in a step counts once, except in ``drawn`` and
    ``repeated_in_batch``.
    """

    drawn: int  # samples in the global batch
    new: int  # different samples that no earlier step drew, as far as the ledger holds them
    repeated_own: int  # draws of a sample that the same worker drew in an earlier step
    repeated_cross: int  # draws of a sample that only other workers drew in earlier steps
    # for each worker, how many samples crossed from one worker to a second in this step with it as
    # the first or the second. A sample crosses once; of several workers that draw it then, the one
    # of lowest rank is the second.
    crossing_by_rank: tuple[int, ...]
    repeated_in_batch: int  # draws of a sample that the same worker already has in this step
    shared: int  # different samples that two or more workers drew in this step
    # ``(rank_i, rank_j, count)`` with i < j for pairs of workers with common samples; the
    # ``MAX_SHARED_PAIRS`` with the largest counts when there are more. With thousands of common
    # draws only those between neighbours in rank are counted.
    shared_between: tuple[tuple[int, int, int], ...]

    @property
    def repeats(self) -> int:
        """Draws of samples that were drawn before, in this step or an earlier one."""
        before = self.repeated_own + self.repeated_cross
        return before + self.repeated_in_batch + self.shared


class SampleLedger(Stateful):
    """Stores which samples were drawn, and by which workers.

    Costs 12 bytes per different sample, and 9 for each further worker that draws it. Further
    workers are identified by 64-bit hashes: with 3 million, one ledger in a million mistakes one.

    ``capacity``: different samples to store. Beyond it, ``distinct`` is a lower bound. Three
    times as many further workers are stored; beyond that, a repeat whose owners are unknown
    counts as the worker's own: the reading that accuses nobody.
    """

    SETTINGS = ("capacity",)

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self._first_owners = SortedMap(np.int32)
        self._pairs = SortedMap(np.int8)  # of a sample and a further owner
        self._pairs_complete = True
        self.exact = True  # it holds every sample that was drawn

    @property
    def distinct(self) -> int:
        """Different samples drawn so far; a lower bound when not :attr:`exact`."""
        return len(self._first_owners)

    def observe(self, draws: Draws) -> list[SampleCounts]:
        """Count the draws of consecutive steps that share no sample, then store them.

        Several steps are possible at once as long as there is room for them, see :meth:`has_room`.
        """
        pairs, first_P = _without_repeats(draws)
        samples_U = pairs.samples
        firsts_U = pairs.ranks
        shared_P = None
        sample_of_P: Ints | slice = slice(None)
        if not first_P.all():  # several workers drew the same sample
            samples_U = pairs.samples[first_P]
            firsts_U = pairs.ranks[first_P]
            sample_of_P = np.cumsum(first_P) - 1
            shared_P = (np.bincount(sample_of_P) > 1)[sample_of_P]
        seen_U, owners_U = self._first_owners.find(samples_U)
        new_U = ~seen_U
        owners_P = owners_U[sample_of_P]
        own_P, cross_P = self._owned(pairs.samples, pairs.ranks, seen_U[sample_of_P], owners_P)
        crossing_SW = self._cross(pairs, cross_P, owners_P)
        new_P = new_U[sample_of_P]
        further_P = cross_P | (new_P & ~first_P)
        self._remember(samples_U[new_U], firsts_U[new_U], pairs.where(further_P))
        return _counts(
            draws, pairs, (first_P, new_P & first_P, own_P, cross_P), crossing_SW, shared_P
        )

    def has_room(self, count: int) -> bool:
        """Return whether there is room for so many more samples, each of one worker."""
        return count <= min(self.capacity - len(self._first_owners), self._room_for_pairs)

    def count_new(self, draws: Draws) -> int:
        """Return how many different samples among the draws the ledger does not hold."""
        samples_U = draws.samples[differs_from_previous(draws.samples)]
        return int(np.count_nonzero(~self._first_owners.find(samples_U)[0]))

    def thin(self, share: SampleShare) -> None:
        """Forget all samples outside a share, as if they had never been drawn.

        Draws stay counted. From now on only samples of the share may be given.
        """
        self._first_owners.keep(share.admits)
        self._pairs.keep(share.admits_hashes)

    def _cross(self, pairs: Draws, cross_P: Bools, owners_P: NDArray[Any]) -> Ints:
        """Count crossings per step and worker ``[S, W]``, and mark the owners as having crossed.

        ``owners_P``: the first to draw each; negative where the sample has crossed already.
        """
        crossing_SW = np.zeros(pairs.shape, np.int64)
        at_C = cross_P.nonzero()[0]
        at_C = at_C[differs_from_previous(pairs.samples[at_C])]  # the first others to draw it
        at_C = at_C[owners_P[at_C] >= 0]
        if not len(at_C):
            return crossing_SW
        firsts = owners_P[at_C]
        self._first_owners.replace(pairs.samples[at_C], -1 - firsts)
        for ranks in (pairs.ranks[at_C], firsts):
            np.add.at(crossing_SW, (pairs.steps[at_C], ranks), 1)
        return crossing_SW

    def _owned(
        self, samples_P: Ints, ranks_P: Ints, seen_P: Bools, owners_P: NDArray[Any]
    ) -> tuple[Bools, Bools]:
        """Return which draws repeat the worker's own samples, and which only those of others.

        ``owners_P``: the first to draw each; -1 minus its rank where it has crossed already.
        """
        if not self._pairs_complete:
            return seen_P, np.zeros_like(seen_P)
        own_P = seen_P & (np.maximum(owners_P, -1 - owners_P) == ranks_P)
        others_P = seen_P & ~own_P
        if others_P.any():
            keys = _pair_keys(samples_P[others_P], ranks_P[others_P])
            order = keys.argsort()  # sorted keys are found much faster
            found = np.empty(len(order), bool)
            found[order] = self._pairs.find(keys[order])[0]
            own_P[others_P] = found
        return own_P, seen_P & ~own_P

    def _remember(self, new_samples: Ints, owners: Ints, further: Draws) -> None:
        room = max(self.capacity - len(self._first_owners), 0)
        self.exact = self.exact and len(new_samples) <= room
        self._first_owners.add(new_samples[:room], owners[:room])
        count = len(further.samples)
        self._pairs_complete = self._pairs_complete and count <= self._room_for_pairs
        if self._pairs_complete and count:
            keys = np.sort(_pair_keys(further.samples, further.ranks))
            self._pairs.add(keys, np.zeros(count, np.int8))

    @property
    def _room_for_pairs(self) -> int:
        return _FURTHER_OWNERS * self.capacity - len(self._pairs)


def identical_groups(samples: Sequence[Ints]) -> tuple[tuple[int, ...], ...]:
    """Return groups of two or more ranks whose batches hold the same samples equally often.

    ``samples``: one int64 array per worker, in rank order; empty batches are equal to none. Groups
    and their members are in the order of ranks.

    Example:
        >>> identical_groups([np.array([1, 2]), np.array([3]), np.array([2, 1])])
        ((0, 2),)
    """
    lengths = [len(batch) for batch in samples]
    flat = np.concatenate([_NONE, *samples]).astype(np.int64, copy=False)
    if len(set(lengths)) == 1:
        content = np.sort(flat.reshape(len(lengths), -1), axis=1).tobytes()
    else:
        batch_of = np.repeat(np.arange(len(samples)), lengths)
        content = flat[np.lexsort((flat, batch_of))].tobytes()
    groups: dict[bytes, list[int]] = {}
    end = 0
    for rank, length in enumerate(lengths):
        begin = end
        end = end + 8 * length
        if length:
            groups.setdefault(content[begin:end], []).append(rank)
    if len(groups) == len(lengths):
        return ()
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


def _without_repeats(draws: Draws) -> tuple[Draws, Bools]:
    """Return the draws without repeats by one worker, and which are the first of their sample."""
    first_D = differs_from_previous(draws.samples)
    if first_D.all():
        return draws, first_D
    kept_D = first_D | differs_from_previous(draws.ranks)
    return draws.where(kept_D), first_D[kept_D]


def _counts(
    draws: Draws,
    pairs: Draws,
    flags: Sequence[Bools],
    crossing_SW: Ints,
    shared_P: Bools | None,
) -> list[SampleCounts]:
    """Return the counts of each step.

    ``pairs``: draws without repeats of a sample by one worker. ``flags``: which pairs are different
    samples, new ones, own repeats, repeats of others' ``[P]``. ``shared_P``: which pairs draw a
    sample of several workers; None if none does.
    """
    drawn_S, kept_S, *flagged_S = (
        np.bincount(steps, minlength=draws.shape[0]).tolist()
        for steps in (draws.steps, pairs.steps, *(pairs.steps[flag_P] for flag_P in flags))
    )
    found = []
    for step, counts in enumerate(zip(drawn_S, kept_S, *flagged_S, strict=True)):
        drawn, kept, _, new, own, cross = counts
        shared = 0
        links: tuple[tuple[int, int, int], ...] = ()
        if shared_P is not None:
            here_P = shared_P & (pairs.steps == step)
            shared = int(np.count_nonzero(here_P & flags[0]))
            links = _links(pairs.samples[here_P], pairs.ranks[here_P])
        crossing = tuple(crossing_SW[step].tolist())
        repeated = drawn - kept
        found.append(SampleCounts(drawn, new, own, cross, crossing, repeated, shared, links))
    return found


def _pair_keys(samples_P: Ints, ranks_P: Ints) -> Ints:
    """Return one 64-bit hash per pair, whose highest bits decide the sample's share."""
    hashes = mix(np.concatenate([samples_P, samples_P ^ (ranks_P * _SPREAD)]))
    samples = hashes[: len(samples_P)]
    pairs = hashes[len(samples_P) :]
    keys: Ints = ((samples & _HIGH) | (pairs & _LOW)).view(np.int64)
    return keys


def _links(samples_P: Ints, ranks_P: Ints) -> tuple[tuple[int, int, int], ...]:
    """Count common samples per pair of workers, nearest neighbours first, up to a limit."""
    links: list[Ints] = []
    num_ranks = int(ranks_P.max(initial=0)) + 1
    total = 0
    distance = 1
    while distance < len(samples_P) and total < _MAX_LINKS:
        same = samples_P[distance:] == samples_P[:-distance]
        if not same.any():
            break
        links.append(ranks_P[:-distance][same] * num_ranks + ranks_P[distance:][same])
        total += int(same.sum())
        distance += 1
    if not links:
        return ()
    pairs, counts = np.unique(np.concatenate(links), return_counts=True)
    largest = np.sort(np.argsort(-counts, kind="stable")[:MAX_SHARED_PAIRS])
    return tuple(
        (*divmod(int(pair), num_ranks), int(count))
        for pair, count in zip(pairs[largest], counts[largest], strict=True)
    )


@dataclass(frozen=True, slots=True)
class Followed:
    """A step's samples, as far as they are followed."""

    counts: SampleCounts  # counts of the followed samples
    samples: Ints  # the followed samples, worker by worker
    drawn: int  # samples drawn up to this step, by all workers together
    remembered: int  # different samples that were stored after it


class ThinningLedger(Stateful):
    """Stores the samples of each worker, in bounded memory.

    Exact while no more than ``capacity`` different samples were drawn. Then it forgets half of
    them, chosen by their hashes, and follows the other half alone; and again whenever it is full.
    The share that is followed is a random sample of all, so what holds in it holds in the whole.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._ledger = SampleLedger(capacity)
        self._share = SampleShare()
        self._drawn = 0

    @property
    def one_in(self) -> int:
        """Number of samples that each followed one stands for; 1 while it is exact."""
        return self._share.one_in

    @property
    def complete(self) -> bool:
        """Whether every sample of the share was stored; false only beyond 10^12 samples."""
        return self._ledger.exact

    def forget(self) -> None:
        """Forget all samples and draws; the share that is followed stays."""
        self._ledger = SampleLedger(self._ledger.capacity)
        self._drawn = 0

    def observe(self, drawn: DrawnSamples) -> Iterator[Followed]:
        """Count and store the draws of consecutive steps, one with each iteration."""

        def fits(samples: Ints) -> bool:
            return self._ledger.has_room(int(np.count_nonzero(self._share.admits(samples))))

        for steps in drawn.fitting_pieces(fits):
            yield from self._follow(steps)

    def _follow(self, drawn: DrawnSamples) -> Iterator[Followed]:
        """Process steps that share no sample: a single one, or several if there is room."""
        admitted_D = self._share.admits(drawn.flat)
        draws = drawn.sorted(admitted_D)
        while self._is_full(draws) and self._share.can_halve:
            self._share.halve()
            self._ledger.thin(self._share)
            admitted_D = self._share.admits(drawn.flat)
            draws = drawn.sorted(admitted_D)
        counts = self._ledger.observe(draws)
        remembered = self._ledger.distinct - sum(each.new for each in counts[1:])
        samples = drawn.in_steps(admitted_D)
        for index, (each, length) in enumerate(zip(counts, drawn.lengths.tolist(), strict=True)):
            self._drawn += length
            remembered += each.new if index else 0
            yield Followed(each, samples[index], self._drawn, remembered)

    def scale_up(self, followed: int) -> tuple[float, float]:
        """Return the number of samples that so many followed ones stand for, and its error."""
        return self._share.scale_up(followed)

    def _is_full(self, draws: Draws) -> bool:
        room = self._ledger.capacity - self._ledger.distinct
        return len(draws.samples) > room and self._ledger.count_new(draws) > room
