"""Which samples came on more than one rank, and whether chance explains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAME_SHARE = 0.5
"""Share of steps in which two ranks have the same batch, from which they read the same data."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What ranks drew together.

    Attributes:
        drawn: Samples drawn by all ranks.
        distinct: Different ones among them.
        repeats: Draws of a sample that had been drawn before, but for those of padding.
        own: Those of them whose rank had drawn the sample before itself.
        padding: Repeats at the epoch's end, fewer than ranks.
        chance: Probability of so few own repeats if data only hold some content several times, or
            ranks draw with replacement: each repeat then hits its own rank with 1/W at least.
        same_batches: Groups of ranks that read the same batches.
        ranks: Ranks that drew what another rank had drawn.
    """

    drawn: int
    distinct: int
    repeats: int
    own: int
    padding: int
    chance: float
    same_batches: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def compare(samples: Sequence[Sequence[Sequence[int]]], *, ended: bool) -> Overlap:
    """Compare what ranks have drawn.

    Args:
        samples: Digests by rank, batch and sample.
        ended: Whether all ranks have read to the epoch's end.
    """
    num_ranks = len(samples)
    steps = max(map(len, samples), default=0)
    seen: dict[int, set[int]] = {}
    repeats = own = padding = 0
    ranks: set[int] = set()
    for step in range(steps):
        again: list[tuple[int, int]] = []
        for rank, batches in enumerate(samples):
            for digest in batches[step] if step < len(batches) else ():
                if digest in seen:
                    again.append((rank, digest))
                    own += rank in seen[digest]
                seen.setdefault(digest, set()).add(rank)
        if ended and step == steps - 1 and len(again) < num_ranks and not repeats:
            padding, own = len(again), 0
        else:
            repeats += len(again)
            ranks |= {member for _, digest in again for member in seen[digest]}
    return Overlap(
        drawn=sum(len(batch) for batches in samples for batch in batches),
        distinct=len(seen),
        repeats=repeats,
        own=own,
        padding=padding,
        chance=chance_of_few(own, repeats, 1 / num_ranks),
        same_batches=_same_batches(samples),
        ranks=tuple(sorted(ranks)),
    )


def chance_of_few(hits: int, trials: int, probability: float) -> float:
    """Return the probability of at most so many hits, of a binomial distribution."""
    if not trials or probability >= 1:
        return 1.0
    terms = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(probability)
        + (trials - k) * math.log1p(-probability)
        for k in range(hits + 1)
    )
    return min(1.0, math.fsum(map(math.exp, terms)))


def _same_batches(samples: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks that have the same batch in most steps, whatever its inner order."""
    keys = [[hash(tuple(sorted(batch))) for batch in batches] for batches in samples]
    groups: list[list[int]] = []
    for rank, mine in enumerate(keys):
        for group in groups:
            theirs = keys[group[0]]
            shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
            if mine and shared >= SAME_SHARE * max(len(mine), len(theirs)):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(tuple(group) for group in groups if len(group) > 1)
