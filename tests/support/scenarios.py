"""Runs several checks in one set of ranks, and keeps their failures apart."""

import traceback
from collections.abc import Callable, Sequence

from support.ranks import run_ranks

Scenario = Callable[[], None]


def run_scenarios(scenarios: Sequence[Scenario], num_ranks: int) -> dict[str, str]:
    """Run scenarios one after the other on every rank."""
    ranks = run_ranks(_attempt_all, num_ranks, list(scenarios), timeout=240)
    return {s.__name__: "\n".join(filter(None, (r[s.__name__] for r in ranks))) for s in scenarios}


def _attempt_all(rank: int, scenarios: Sequence[Scenario]) -> dict[str, str]:
    return {scenario.__name__: _attempt(rank, scenario) for scenario in scenarios}


def _attempt(rank: int, scenario: Scenario) -> str:
    try:
        scenario()
    except Exception:
        return f"rank {rank}: {traceback.format_exc()}"
    return ""
