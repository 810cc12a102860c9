"""The detector of samplers that shuffle with another seed than the planned one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence, Observation
from rankscope.diagnose.rules import name_ranks

KEY = "seed-not-planned"


class PlannedSeed(Stateful):
    """Compares the seed of each rank's sampler, as it was at the start, with the plan's.

    Args:
        planned: The seed that is intended; None if the plan does not say.
        seeds: Each rank's, None where it is not known; empty when nothing is known.
    """

    SETTINGS = ("_planned", "_wrong")

    def __init__(self, planned: int | None, seeds: Sequence[int | None] = ()) -> None:
        self._planned = planned
        self._wrong = {
            rank: seed
            for rank, seed in enumerate(seeds)
            if None not in (planned, seed) and seed != planned
        }
        self._told = False

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step; speaks with the first one after a start."""
        if self._told or not self._wrong:
            return ()
        self._told = True
        number = step.gathered.step
        ranks = tuple(self._wrong)
        return (
            Evidence(
                cause="state.schedule",
                key=KEY,
                severity=Severity.WARNING,
                ranks=ranks,
                first_step=number,
                last_step=number,
                count=1,
                fields={
                    "Ranks": name_ranks(ranks).capitalize(),
                    "planned": self._planned,
                    "seeds": ", ".join(map(str, dict.fromkeys(self._wrong.values()))),
                },
                numbers={"planned": self._planned, "seeds": list(self._wrong.values())},
            ),
        )

    def close(self) -> Iterable[Evidence]:
        """End the run."""
        return ()


def seeds_of(info: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the seed of each rank's sampler, as ``run.json`` states it."""
    entries = info.get("ranks")
    ranks = entries if isinstance(entries, list) else []
    seeds = {e.get("rank"): e.get("sampler_seed") for e in ranks if isinstance(e, Mapping)}
    return tuple(seeds.get(rank) for rank in range(len(seeds)))
