"""How the ranks of a run ended that was cut short, and which of them was the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.bus.words import all_workers, name_ranks

_TOGETHER_SECONDS = 0.5  # ranks that end alike within this time have no first one among them
_MOST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class RankEnding:
    """The end of ranks that ended together, in the same way."""

    ranks: tuple[int, ...]
    last_step: int  # of the rank that got least far
    why: str  # such as "its process ended"

    @property
    def how(self) -> str:
        """The reason without its pronoun: "process ended", or "killed by SIGKILL"."""
        known = self.why.removeprefix("its process ended (")
        return (
            known[:-1] if known != self.why else self.why.removeprefix("its ").removeprefix("it ")
        )


@dataclass(frozen=True, slots=True)
class Endings:
    """How ranks ended, the first ones first; where the others still ran, they are left out."""

    groups: tuple[RankEnding, ...] = ()
    num_workers: int = 0

    @property
    def first(self) -> RankEnding | None:
        """The first ranks to end; None where all ended together, or nothing is known."""
        if not self.groups or len(self.groups[0].ranks) == self.num_workers:
            return None
        return self.groups[0]

    @property
    def headline(self) -> str:
        """Which ranks ended first and how, in a sentence; empty where that is not known."""
        if self.first is None:
            ways = ("its training", "its process ended (")
            own = [one for one in self.groups if one.why.startswith(ways)]
            who = all_workers(self.num_workers).capitalize()
            return f"{who} ended there ({own[0].how})." if own else ""
        return f"{name_ranks(self.first.ranks).capitalize()} ended first ({self.first.how})."

    @property
    def where_to_look(self) -> str:
        """Which log shows why: ranks that are stopped from outside end one after the other, too."""
        stopped = any("killed by" in one.why for one in self.groups)
        if self.first is None:
            return f"See the log {'of what stopped the job' if stopped else 'of the training'}."
        log = f"See the log of {name_ranks(self.first.ranks)}"
        last = self.groups[-1].how
        if last == "killed by SIGTERM" and self.first.how in ("process ended", last):
            return f"{log}, or of what stopped the job: the launcher sends SIGTERM to all ranks."
        return f"{log}: others may only have followed."

    def describe(self) -> str:
        """Return the order in which ranks ended; empty where none was the first."""
        if self.first is None:
            return ""
        parts = [
            f"{name_ranks(one.ranks)} after step {one.last_step:,} ({one.how})"
            for one in self.groups[:_MOST_GROUPS]
        ]
        others = [rank for one in self.groups[_MOST_GROUPS:] for rank in one.ranks]
        if others:
            parts.append(name_ranks(others))
        if len(parts) == 1:
            return f"The first to end: {parts[0]}."
        return f"The ranks ended in this order: {', then '.join(parts)}."


NOT_KNOWN = Endings()


def read_endings(info: Mapping[str, Any]) -> Endings:
    """Return how the ranks of a run ended, as far as it is on record."""
    try:
        num_workers = int(info["num_workers"])
        ends = [
            (int(end["rank"]), int(end["last_step"]), float(end["time"]), str(end["why"]))
            for end in info["ended"]
        ]
    except (KeyError, TypeError, ValueError):
        return NOT_KNOWN
    groups: list[RankEnding] = []
    began = 0.0
    for rank, last_step, time, why in ends:
        if groups and groups[-1].why == why and abs(time - began) <= _TOGETHER_SECONDS:
            last = groups.pop()
            groups.append(RankEnding((*last.ranks, rank), last.last_step, why))
        else:
            groups.append(RankEnding((rank,), last_step, why))
            began = time
    return Endings(tuple(groups), num_workers)
