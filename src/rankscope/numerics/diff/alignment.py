"""Which steps of two runs are compared, and whether these trained on the same batches."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.errors import RunError
from rankscope.numerics.diff.reading import Side
from rankscope.numerics.diff.result import Alignment

MIN_MATCHED = 0.9
"""Share of the compared steps whose batches must agree before another offset is believed."""

MAX_VOTES = 1 << 20
"""Pairs of equal batches that are counted; batches that return most often are left out first."""

SAME_LOSS = 1e-5
"""Relative distance up to which two losses may be those of the same parameters."""


def align(a: Side, b: Side, given: int | None = None) -> Alignment:
    """Return which steps of two runs are compared.

    Steps of equal number are, unless batches say otherwise: a run that continues another may count
    on from another number, and one that starts in the middle of another counts from 0. Another
    offset needs the same global batch in 90 % of the steps, and either a run that is known to
    continue another, or equal losses where they begin.

    Args:
        a: Run A.
        b: Run B.
        given: Step of A minus step of B, if it is known.

    Raises:
        RunError: They have no step in common.
    """
    plain = _overlap(a, b, 0)
    offset, by_samples = given or 0, False
    matched = _matched(a, b, offset)
    hits_plain = matched * len(plain)
    if given is None and hits_plain < min(len(a.batches), len(b.batches)):
        best = _best_offset(a.batches, b.batches)
        hits = _matched(a, b, best) * len(_overlap(a, b, best))
        if best and hits > hits_plain and _believed(a, b, best):
            offset, by_samples = best, True
    steps_a = _overlap(a, b, offset)
    if not len(steps_a):
        raise RunError(
            f"{a.name} (steps {a.steps_T[0]} to {a.steps_T[-1]}) and {b.name} (steps "
            f"{b.steps_T[0]} to {b.steps_T[-1]}) have no step in common: give two runs of the same "
            "training, or say with --offset at which step of the first the second begins"
        )
    return Alignment(
        steps_a,
        steps_a - offset,
        offset,
        (a.num_workers, b.num_workers),
        by_samples or (bool(a.batches) and bool(b.batches) and matched >= MIN_MATCHED),
        _words(a, b, offset, len(steps_a)),
    )


def same_samples(a: Mapping[int, Any], b: Mapping[int, Any]) -> bool:
    """Return whether two dicts of samples by rank hold the same global batch."""
    return _all_of(a) == _all_of(b)


def dealt_otherwise(a: Mapping[int, Any], b: Mapping[int, Any]) -> dict[int, int] | None:
    """Return which worker of B has whose batch of A, where B's are A's in another order.

    Returns:
        By rank of B, the rank of A; only ranks that have another's. None when the batches are not
        those of A as wholes.
    """
    keys_a = {rank: np.sort(ids).tobytes() for rank, ids in a.items()}
    keys_b = {rank: np.sort(ids).tobytes() for rank, ids in b.items()}
    if Counter(keys_a.values()) != Counter(keys_b.values()):
        return None
    free = {rank: key for rank, key in keys_a.items() if keys_b.get(rank) != key}
    moved = {}
    for rank, key in keys_b.items():
        if keys_a.get(rank) != key:
            owner = next(other for other, theirs in free.items() if theirs == key)
            del free[owner]
            moved[rank] = owner
    return moved


def _all_of(samples: Mapping[int, Any]) -> bytes:
    return b"" if not samples else np.sort(np.concatenate(list(samples.values()))).tobytes()


def _overlap(a: Side, b: Side, offset: int) -> Any:
    return np.intersect1d(a.steps_T, b.steps_T + offset)


def _matched(a: Side, b: Side, offset: int) -> float:
    """Return the share of compared steps that have the same global batch."""
    steps = _overlap(a, b, offset)
    equal = [
        a.batches[int(step)] == b.batches[int(step) - offset]
        for step in steps
        if int(step) in a.batches and int(step) - offset in b.batches
    ]
    return float(np.mean(equal)) if equal else 0.0


def _best_offset(a: Mapping[int, bytes], b: Mapping[int, bytes]) -> int:
    """Return the offset at which most steps have the same batch; the least if tied, 0 if none has.

    Batches that return (later epochs) vote for several offsets; the common one wins. The rarest
    vote first, as long as there are no more than ``MAX_VOTES``.
    """
    where_a, where_b = _steps_of(a), _steps_of(b)
    pairs = sorted(
        ((where_a[key], steps_b) for key, steps_b in where_b.items() if key in where_a),
        key=lambda pair: len(pair[0]) * len(pair[1]),
    )
    votes: Counter[int] = Counter()
    left = MAX_VOTES
    for steps_a, steps_b in pairs:
        left -= len(steps_a) * len(steps_b)
        if left < 0:
            break
        votes.update(step_a - step_b for step_b in steps_b for step_a in steps_a)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset)), default=0)


def _steps_of(batches: Mapping[int, bytes]) -> dict[bytes, list[int]]:
    steps: dict[bytes, list[int]] = {}
    for step, key in batches.items():
        steps.setdefault(key, []).append(step)
    return steps


def _believed(a: Side, b: Side, offset: int) -> bool:
    steps = _overlap(a, b, offset)
    if _matched(a, b, offset) < MIN_MATCHED:
        return False
    if any("continues" in side.info for side in (a, b)):
        return True
    if not len(_overlap(a, b, 0)):
        return True
    first = int(steps[0])
    one = a.weighted_loss()[np.searchsorted(a.steps_T, first)]
    other = b.weighted_loss()[np.searchsorted(b.steps_T, first - offset)]
    return bool(abs(one - other) <= SAME_LOSS * abs(one))


def _words(a: Side, b: Side, offset: int, count: int) -> str:
    words = f"{count:,} steps compared"
    if offset:
        words += f"; by their batches, step s of B is step s {offset:+d} of A"
    for name, side in (("A", a), ("B", b)):
        extra = len(side.steps_T) - count
        if extra > 0:
            words += f"; {extra:,} more in {name} only"
    if a.num_workers != b.num_workers:
        words += f"; {a.num_workers} workers in A, {b.num_workers} in B"
    return words
