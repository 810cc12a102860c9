"""Compares the collectives of all ranks in a hang: which one does not end, and who is not in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope.agent.flight_recorder import Collectives, Entry, Group
from rankscope.bus.words import name_ranks

_UNEVEN = {
    *("all_gather", "allgather", "reduce_scatter", "gather", "scatter", "coalesced"),
    *("all_to_all", "alltoall", "all_to_all_single", "all_to_all_v_single"),
}
"""Operations whose shapes may differ between ranks."""

_SHOWN_SHAPES = 3
_SHOWN_CALLS = 4

Call = tuple[str, str]
"""An operation, and its shapes and types in words."""


@dataclass(frozen=True, slots=True)
class HangingCollective:
    """The first collective that has not ended, or that is not the same on all ranks.

    Attributes:
        group: The process group's title.
        number: The collective's number in that group.
        calls: The ranks that have entered each call; one call unless they differ.
        absent: Ranks of the group that have not entered it.
        differs: Whether ranks have entered different collectives.
    """

    group: str
    number: int
    calls: Mapping[Call, tuple[int, ...]]
    absent: tuple[int, ...] = ()
    differs: bool = False

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks in another collective than most, or all if there is no majority; else absent."""
        if not self.differs:
            return self.absent
        sizes = sorted(map(len, self.calls.values()))
        most = sizes[-1] if sizes[-1] > sizes[-2] else 0
        return tuple(
            sorted(r for ranks in self.calls.values() if len(ranks) != most for r in ranks)
        )

    def __str__(self) -> str:
        if self.differs:
            calls = [
                f"{name_ranks(ranks)} in {' '.join(call)}" for call, ranks in self.calls.items()
            ]
            more = f"; {len(calls) - _SHOWN_CALLS} more" if len(calls) > _SHOWN_CALLS else ""
            return (
                f"collective {self.number:,} of {self.group} is not the same on all ranks: "
                f"{'; '.join(calls[:_SHOWN_CALLS])}{more}"
            )
        ((operation, content),) = self.calls
        text = f"{operation} {self.number:,} of {self.group}, {content}, does not end"
        if not self.absent:
            return f"{text}, and all its ranks have entered it"
        has = "has" if len(self.absent) == 1 else "have"
        return f"{text}: {name_ranks(self.absent)} {has} not entered it"


def hanging_collective(known: Mapping[int, Collectives]) -> HangingCollective | None:
    """Return the collective in which a training hangs; None if none is under way.

    Groups wait for one another where a rank waits in one and is absent from the next. So a
    mismatch comes first, then a group whose absent ranks wait in no other.

    Args:
        known: The entries of each rank of the run, those that could be read.
    """
    names = dict.fromkeys(name for one in known.values() for name in one["groups"])
    found = [one for name in names if (one := _of_group(name, known)) is not None]
    waiting = {rank for one in found for ranks in one.calls.values() for rank in ranks}
    return min(
        found,
        key=lambda one: (not one.differs, not one.absent, not waiting.isdisjoint(one.absent)),
        default=None,
    )


def _of_group(name: str, known: Mapping[int, Collectives]) -> HangingCollective | None:
    entries: dict[int, dict[int, Entry]] = {
        rank: {entry[0]: entry for entry in one["groups"][name]["entries"]}
        for rank, one in known.items()
        if name in one["groups"]
    }
    waits = [n for by_number in entries.values() for n, entry in by_number.items() if not entry[4]]
    if not waits:
        return None
    first = min(waits)
    groups = [one["groups"][name] for one in known.values() if name in one["groups"]]
    title = groups[0]["title"]
    for number in sorted({n for by_number in entries.values() for n in by_number if n <= first}):
        calls = _calls({rank: one[number] for rank, one in entries.items() if number in one})
        if len(calls) > 1:
            return HangingCollective(title, number, calls, differs=True)
    calls = _calls({rank: one[first] for rank, one in entries.items() if first in one})
    members = entries.keys() | _members(groups, known)
    absent = tuple(r for r in sorted(members) if max(entries.get(r, ()), default=-1) < first)
    return HangingCollective(title, first, calls, absent)


def _members(groups: Iterable[Group], known: Mapping[int, Collectives]) -> set[int]:
    """Return the ranks of a group, also those that have entered nothing in it yet."""
    listed = {rank for group in groups for rank in group["ranks"]}
    whole = any(group["title"] == "default_pg" for group in groups)
    return {rank for rank, one in known.items() if whole or one["rank"] in listed}


def _calls(entries: Mapping[int, Entry]) -> dict[Call, tuple[int, ...]]:
    """Return the ranks of each different call, that of most ranks first."""
    by_call: dict[tuple[str, str], list[int]] = {}
    shown: dict[tuple[str, str], Call] = {}
    for rank, (_, operation, shapes, types, _) in entries.items():
        content = _words(shapes, types)
        key = (operation, "" if operation in _UNEVEN else str((shapes, types)))
        by_call.setdefault(key, []).append(rank)
        shown.setdefault(key, (operation, content))
    ordered = sorted(by_call, key=lambda key: -len(by_call[key]))
    return {shown[key]: tuple(sorted(by_call[key])) for key in ordered}


def _words(shapes: list[list[int]], types: list[str]) -> str:
    """Return shapes and types as words: ``7×2 Float``."""
    texts = ["×".join(map(str, shape)) or "scalar" for shape in shapes]
    more = f" and {len(texts) - _SHOWN_SHAPES} more" if len(texts) > _SHOWN_SHAPES else ""
    shown = f"{', '.join(texts[:_SHOWN_SHAPES])}{more}"
    return f"{shown} {'/'.join(dict.fromkeys(types))}".strip() or "no tensor"
