"""The detector of random numbers that workers share, or do not share though they should."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.core.finding import Severity
from rankscope.core.plan import Plan
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT, Ints
from rankscope.diagnose.evidence import Evidence, Observation
from rankscope.diagnose.lasting import Lasting
from rankscope.diagnose.minority import odd_ranks
from rankscope.diagnose.rules import count, name_ranks

STEPS_NEEDED = 3

IDENTICAL, DIFFERS = "rng.identical", "rng.differs"
LOADERS = "loader-rng-identical"

_GENERATORS = {1: "Python's", 2: "numpy's", 4: "torch's on the CPU", 8: "the accelerator's"}
_OF_LOADERS = {
    "loader_rng_python": (1, "Python's"),
    "loader_rng_numpy": (2, "numpy's"),
    "loader_rng_torch": (4, "torch's"),
}


class EqualRandom(Stateful):
    """Workers that draw the same random numbers; by plan, those that draw different ones.

    - Forward passes of several workers that start from equal states of the generators that they
      move. Generators that never move are of no concern.
    - Processes of data loaders that start from equal states of a generator that they use, in one
      rank or in several.

    Args:
        num_workers: W.
        plan: What is intended: the same random numbers, or (unless said) different ones.
    """

    SETTINGS = ("_num_workers", "_same")

    def __init__(self, num_workers: int, plan: Plan | None = None) -> None:
        self._num_workers = num_workers
        self._same = plan is not None and plan.random == "same"
        self._forward = Lasting(STEPS_NEEDED)
        self._used = 0
        self._loaders = Lasting(STEPS_NEEDED)
        self._shared = 0
        self._inside: set[int] = set()
        self._across: set[int] = set()

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step; speaks while workers share random numbers, and when that ends."""
        workers, number = step.gathered.workers, step.gathered.step
        told: list[Evidence] = []
        if self._num_workers > 1 and self._see_forward(number, workers):
            told.append(self._forward_evidence())
        if self._see_loaders(number, workers):
            told.append(self._loader_evidence())
        return told

    def close(self) -> Iterable[Evidence]:
        """End the run."""
        return ()

    def _see_forward(self, step: int, workers: Mapping[str, Ints]) -> bool:
        used_W, digests_W = workers["rng_used"], workers["rng_digest"]
        known_W = (digests_W != MISSING_INT) & (used_W != MISSING_INT) & (used_W != 0)
        if (used_W == MISSING_INT).all():
            return False
        if self._same:
            values = [
                (used, digest) if known else None
                for used, digest, known in zip(used_W, digests_W, known_W, strict=True)
            ]
            ranks = odd_ranks(values)
        else:
            ranks = _sharing(np.stack([used_W, digests_W], axis=1), known_W)
        for rank in ranks:
            self._used |= int(used_W[rank])
        return self._forward.observe(step, ranks)

    def _see_loaders(self, step: int, workers: Mapping[str, Ints]) -> bool:
        repeats_W = workers["loader_rng_repeats"]
        if (repeats_W == MISSING_INT).all():
            return False
        inside = np.flatnonzero(repeats_W > 0).tolist()
        for rank in inside:
            self._shared |= int(repeats_W[rank])
        ranks = set(inside)
        for name, (bit, _) in _OF_LOADERS.items():
            digests_W = workers[name]
            across = _sharing(digests_W[:, None], digests_W != MISSING_INT)
            if across and not self._same:
                self._shared |= bit
                self._across.update(across)
                ranks.update(across)
        self._inside.update(inside)
        return self._loaders.observe(step, ranks)

    def _forward_evidence(self) -> Evidence:
        seen = self._forward
        ranks = tuple(sorted(seen.ranks))
        generators = [name for bit, name in _GENERATORS.items() if self._used & bit]
        return Evidence(
            cause=DIFFERS if self._same else IDENTICAL,
            severity=Severity.WARNING,
            ranks=ranks,
            first_step=seen.first,
            last_step=seen.last,
            count=seen.count,
            fields={
                "ranks": name_ranks(ranks),
                "steps": count(seen.count, "step"),
                "generators": _listed(generators),
                "over": _over(seen),
            },
            numbers={"steps": seen.count, "generators": generators},
            status="open" if seen.open else "closed",
        )

    def _loader_evidence(self) -> Evidence:
        seen = self._loaders
        ranks = tuple(sorted(seen.ranks))
        generators = [name for bit, name in _OF_LOADERS.values() if self._shared & bit]
        where = [f"several processes of {name_ranks(self._inside)}"] if self._inside else []
        if self._across:
            where.append(f"{name_ranks(self._across)} among each other")
        return Evidence(
            cause=IDENTICAL,
            severity=Severity.WARNING,
            ranks=ranks,
            first_step=seen.first,
            last_step=seen.last,
            count=seen.count,
            fields={
                "generators": _listed(generators),
                "where": " and ".join(where),
                "steps": count(seen.count, "step"),
                "over": _over(seen),
            },
            numbers={
                "steps": seen.count,
                "generators": generators,
                "alike_inside": sorted(self._inside),
                "alike_across": sorted(self._across),
            },
            key=LOADERS,
            status="open" if seen.open else "closed",
        )


def _sharing(values_WV: Ints, known_W: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the workers whose values ``[W, V]`` another worker has as well."""
    ranks = np.flatnonzero(known_W)
    if len(ranks) < 2:
        return ()
    _, inverse, counts = np.unique(
        values_WV[ranks], axis=0, return_inverse=True, return_counts=True
    )
    return tuple(ranks[counts[inverse.reshape(-1)] > 1].tolist())


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _over(seen: Lasting) -> str:
    return "" if seen.open else f" It was last seen at step {seen.last:,}."
