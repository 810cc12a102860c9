"""Finds the ranks that hold up all others in a hang: from places, states, stacks and collectives.

All of it is plain data: with several hosts, states and stacks come over the network.
"""

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypedDict

from rankscope.bus.words import first_of, name_ranks

_NAME = "rankscope-collectives"
_REQUEST = b"?"
_END = b"."
_HEADER = struct.Struct("=2q")  # number of the answer, and its bytes
_LOOK_SECONDS = 0.02
_CLOSE_SECONDS = 1.0
_MOST_ENTRIES = 256  # of a process group
_MOST_BYTES = 64 << 20

Entry = tuple[int, str, list[list[int]], list[str], bool]
"""A collective: number, operation, shapes, types, and whether it has ended."""


class Group(TypedDict):
    """The collectives of a process group on one rank."""

    title: str  # its description, or else its name
    ranks: list[int]  # its global ranks; empty if the recorder does not have them
    entries: list[Entry]  # its last collectives, in order


class Collectives(TypedDict):
    """What one rank's recorder holds."""

    rank: int  # the global rank
    groups: dict[str, Group]  # process groups by name; a name is the same on all ranks


class RecorderDescriptors(NamedTuple):
    """The file descriptors of a :class:`RecorderThread`, for the hello frame."""

    request: int
    answer: int


class RecorderThread:
    """The training's end of torch's Flight Recorder, which the agent reads while a training hangs.

    The training's thread is blocked then. So this thread sleeps in a system call until the agent
    requests the entries, and writes them into memory that the agent has opened, too. A dump of
    NCCL's recorder queries events of the device; where that blocks, this thread alone waits.

    ``dumps`` returns what the recorders hold, each in torch's JSON form; ``members`` the global
    ranks of this process's groups by name, which gloo's recorder does not hold.
    """

    def __init__(
        self,
        rank: int,
        dumps: Callable[[], Sequence[bytes]],
        members: Callable[[], Mapping[str, list[int]]] = dict,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._rank = rank
        self._dumps = dumps
        self._members = members
        requests, request = os.pipe2(os.O_CLOEXEC)
        answer = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(answer, mmap.PAGESIZE)
        self.numbers = RecorderDescriptors(request, answer)
        self._requests = requests
        self._identities = {each: os.fstat(each).st_ino for each in (requests, request, answer)}
        self._thread = threading.Thread(target=self._work, name=_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which closes the descriptors, unless a dump still blocks it."""
        with contextlib.suppress(OSError):
            if self._owns(self.numbers.request):
                os.write(self.numbers.request, _END)
                self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count(1):
                if not self._owns(self._requests) or os.read(self._requests, 1) != _REQUEST:
                    break
                content = self._content()
                if not self._owns(self.numbers.answer):
                    break
                os.pwrite(self.numbers.answer, content, _HEADER.size)
                os.pwrite(self.numbers.answer, _HEADER.pack(number, len(content)), 0)
        for each in self._identities:
            with contextlib.suppress(OSError):
                if self._owns(each):
                    os.close(each)

    def _content(self) -> bytes:
        try:
            return json.dumps(read_dumps(self._rank, self._dumps(), self._members())).encode()
        except Exception:  # another release's form, or torch's own error
            return b"null"

    def _owns(self, descriptor: int) -> bool:
        """Return whether it is still ours: a script may close files that are not its own."""
        return os.fstat(descriptor).st_ino == self._identities[descriptor]


def read_dumps(
    rank: int, dumps: Iterable[bytes], members: Mapping[str, list[int]] = MappingProxyType({})
) -> Collectives:
    """Return the last collectives of each group; ``members`` has ranks that a recorder lacks."""
    groups: dict[str, Group] = {}
    for dump in dumps:
        content = json.loads(dump)
        for one in content.get("entries", ()):
            name, described = one["process_group"]
            config = content.get("pg_config", {}).get(name, {})
            ranks = json.loads(config.get("ranks") or "[]") or members.get(name, [])
            title = f"group {name}" if described in ("", "undefined") else described
            group = groups.setdefault(name, Group(title=title, ranks=ranks, entries=[]))
            if not one["is_p2p"]:
                group["entries"].append(_entry(one))
    for group in groups.values():
        group["entries"] = _joined(group["entries"])[-_MOST_ENTRIES:]
    return Collectives(rank=rank, groups=groups)


class Reader:
    """The agent's end, of another process's numbers."""

    def __init__(self, pid: int, numbers: Sequence[int]) -> None:
        request, answer = numbers
        self._answer = open_of_process(pid, answer, os.O_RDONLY, f"/memfd:{_NAME}")
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK
            self._request = open_of_process(pid, request, flags, "pipe:")
        except OSError:
            os.close(self._answer)
            raise
        self._before = 0

    def request(self) -> None:
        """Request the entries."""
        with contextlib.suppress(OSError):
            self._before = self._header()[0]
            os.write(self._request, _REQUEST)

    def read(self, until: float) -> Collectives | None:
        """Return the requested entries; None if they have not come ``until`` a monotonic time."""
        try:
            while self._header()[0] == self._before:
                if time.monotonic() > until:
                    return None
                time.sleep(_LOOK_SECONDS)
            size = min(self._header()[1], _MOST_BYTES)
            content: Collectives | None = json.loads(os.pread(self._answer, size, _HEADER.size))
        except (OSError, ValueError):
            return None
        return content

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._request)
        os.close(self._answer)

    def _header(self) -> tuple[int, int]:
        number, size = _HEADER.unpack(os.pread(self._answer, _HEADER.size, 0))
        return number, size


def open_of_process(pid: int, number: int, flags: int, kind: str) -> int:
    """Open a file that another process of this user has open as ``number``; an OSError without."""
    descriptor = os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC)
    if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(kind):
        os.close(descriptor)
        raise OSError(f"expected {kind}, got another file")
    return descriptor


def _entry(one: dict[str, object]) -> Entry:
    """Return an entry of torch's, whose operation is for example ``nccl:all_reduce``."""
    operation = str(one["profiling_name"]).partition(":")[2]
    scatters = operation == "scatter"
    sizes: Any = one["output_sizes" if scatters else "input_sizes"]
    types: Any = one["output_dtypes" if scatters else "input_dtypes"]
    ended = bool(one["retired"]) or one["state"] == "completed"
    return int(str(one["collective_seq_id"])), operation, sizes, types, ended


def _joined(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries by number; those of one number, as of coalesced calls, are one."""
    by_number: dict[int, Entry] = {}
    for number, operation, shapes, types, ended in entries:
        first = by_number.get(number, (number, operation, [], [], True))
        joined = (number, first[1], [*first[2], *shapes], [*first[3], *types], first[4] and ended)
        by_number[number] = joined
    return [by_number[number] for number in sorted(by_number)]


_UNEVEN = {
    *("all_gather", "allgather", "reduce_scatter", "gather", "scatter", "coalesced"),
    *("all_to_all", "alltoall", "all_to_all_single", "all_to_all_v_single"),
}
"""Operations whose shapes may differ between ranks."""

_SHOWN_SHAPES = 3
_SHOWN_CALLS = 4

Call = tuple[str, str]  # an operation, and its shapes and types in words


@dataclass(frozen=True, slots=True)
class HangingCollective:
    """The first collective that has not ended, or that is not the same on all ranks."""

    group: str  # the process group's title
    number: int  # the collective's number in that group
    # the ranks that have entered each call; one call unless they differ
    calls: Mapping[Call, tuple[int, ...]]
    absent: tuple[int, ...] = ()  # ranks of the group that have not entered it
    # where absent ranks wait for ranks that have entered it: collectives, and the ranks in each
    elsewhere: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    differs: bool = False  # whether ranks have entered different collectives

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

    @property
    def entered(self) -> tuple[int, ...]:
        """The ranks that have entered it, in order."""
        return tuple(sorted(rank for ranks in self.calls.values() for rank in ranks))

    @property
    def name(self) -> str:
        """Operation, number and group: ``all_reduce 7 of default_pg``."""
        operations = dict.fromkeys(operation for operation, _ in self.calls)
        return f"{'/'.join(operations)} {self.number:,} of {self.group}"

    def words(self, *, over: bool = False) -> str:
        """Describe it in a clause, as of now or of a hang that is over."""
        if self.differs:
            calls = [
                f"{name_ranks(ranks)} in {' '.join(call)}" for call, ranks in self.calls.items()
            ]
            more = f"; {len(calls) - _SHOWN_CALLS} more" if len(calls) > _SHOWN_CALLS else ""
            return (
                f"collective {self.number:,} of {self.group} {'was' if over else 'is'} not the "
                f"same on all ranks: {'; '.join(calls[:_SHOWN_CALLS])}{more}"
            )
        ((_, content),) = self.calls
        text = f"{self.name}, {content}, {'did' if over else 'does'} not end"
        if not self.absent:
            return f"{text}, and all its ranks {'had' if over else 'have'} entered it"
        has = "had" if over else "has" if len(self.absent) == 1 else "have"
        text += f": {name_ranks(self.absent)} {has} not entered it"
        for place, ranks in self.elsewhere.items():
            who = " and" if ranks == self.absent else f"; {name_ranks(ranks)}"
            text += (
                f"{who} {'waited' if over else 'waits' if len(ranks) == 1 else 'wait'} in {place}"
            )
        return text


def hanging_collective(
    known: Mapping[int, Collectives], behind: Iterable[int] = ()
) -> HangingCollective | None:
    """Return the collective in which a training hangs; None if none is under way.

    Groups wait for one another where a rank waits in one and is absent from the next. So a
    mismatch comes first, then a group whose absent ranks wait in no other. Where there is none,
    ranks wait for one another in a circle: their order of collectives is not the same. Then the
    fewest absent ranks count, and of as many, those in whose place ranks that are ``behind`` wait.
    """
    names = dict.fromkeys(name for one in known.values() for name in one["groups"])
    found = [one for name in names if (one := _of_group(name, known)) is not None]
    waiting = {rank for one in found for rank in one.entered}
    chosen = min(
        found,
        key=lambda one: (
            not one.differs,
            not one.absent,
            not waiting.isdisjoint(one.absent),
            len(one.absent),
            set(behind).isdisjoint(one.entered),
        ),
        default=None,
    )
    if chosen is None or chosen.differs:
        return chosen
    there = {
        one.name: tuple(rank for rank in one.entered if rank in chosen.absent)
        for one in found
        if not set(chosen.entered).isdisjoint(one.absent)
    }
    return replace(chosen, elsewhere={name: ranks for name, ranks in there.items() if ranks})


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
    kinds = "/".join(dict.fromkeys(types))
    return f"{first_of(texts, _SHOWN_SHAPES)} {kinds}".strip() or "no tensor"


_ENGINE = "_engine_run_backward "  # the Python frame that calls autograd's engine
_WRAPPERS = ("(torch/nn/parallel/distributed.py", "(torch/distributed/fsdp/")
_COMPILERS = (  # not where compiled code runs
    "(torch/_dynamo/convert_frame.py",
    "(torch/_inductor/compile_fx.py",
    "(torch/_inductor/graph.py",
    "(torch/_inductor/codecache.py",
    "(torch/_inductor/async_compile.py",
    "(triton/compiler/",
)
_COLLECTIVES = ("(torch/nn/parallel/distributed.py", "(torch/distributed/")


class ProcessState(StrEnum):
    """The state of a rank's process, seen from outside."""

    RUNNING = "running"  # it runs, sleeps or waits; the system gives it time
    STOPPED = "stopped"  # by SIGSTOP or a debugger
    ENDED = "ended"
    UNKNOWN = "unknown"  # no agent has seen the process


class Fate(StrEnum):
    """Why a rank holds up the others."""

    ENDED = "ended"
    STOPPED = "stopped"
    LEFT = "left"  # it closed its scope at an earlier step than the others
    MISSING = "missing"  # it never connected
    STUCK = "stuck"  # its process is alive, and it is behind the others
    AHEAD = "ahead"  # it skipped a collective in which others wait
    OTHER = "other"  # it is in another collective than most others
    SILENT = "silent"  # it is behind, and its host is out of reach


class CodePlace(NamedTuple):
    """The progress of a rank; places from the same look are comparable."""

    step: int  # the step under way; 0 in the first
    passes: int = 0  # number of phases of that step that have begun; 0 where only steps are known
    phase: str = ""  # ``forward``, ``backward`` or ``step``; empty where only steps are known

    def __str__(self) -> str:
        if self.phase == "step":
            return f"after the backward pass of step {self.step}"
        phase = f"the {self.phase} pass of " if self.phase else ""
        return f"in {phase}step {self.step}"


class Stack(TypedDict):
    """The Python stack of a process."""

    thread: str  # name of the thread
    frames: list[str]  # functions with file and line, the innermost first
    missing: str  # why there is none, in a sentence; empty if there is one
    # what torch's Flight Recorder holds in that process, where it is on; None if the process did
    # not answer
    collectives: NotRequired[Collectives | None]


class Standing(NamedTuple):
    """A rank that the others wait for, and why; ``place`` is None if it never connected."""

    rank: int
    fate: Fate
    place: CodePlace | None


@dataclass(frozen=True, slots=True)
class HangReport:
    """A step that does not end, and the ranks that the others wait for."""

    step: int  # the step that has not ended everywhere
    seconds: float  # time without progress on any rank
    suspects: tuple[Standing, ...] = ()  # the ranks that the others wait for
    waiting: tuple[int, ...] = ()  # the other live ranks, in order
    phase: str = ""  # the phase of the waiting ranks; empty if unknown or not the same
    recovered: bool = False  # whether the training goes on after all

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the others wait for, in order."""
        return tuple(sorted(one.rank for one in self.suspects))

    @property
    def behind(self) -> tuple[int, ...]:
        """The live ranks that are behind the others in the program, if some are."""
        if self.with_fate(Fate.AHEAD):
            return self.waiting
        return tuple(one.rank for one in self.with_fate(Fate.STUCK))

    @property
    def is_pause(self) -> bool:
        """Whether no rank is suspect: all are equally far, as in an evaluation or a save."""
        return not self.suspects and self.phase != "backward"

    def with_fate(self, *fates: Fate) -> tuple[Standing, ...]:
        """Return the suspects with one of these fates."""
        return tuple(one for one in self.suspects if one.fate in fates)

    def __str__(self) -> str:
        if self.recovered:
            return f"step {self.step} has ended after {self.seconds:.0f} s; training goes on"
        text = f"step {self.step} has not ended for {self.seconds:.0f} s"
        if not self.suspects:
            where = f", {CodePlace(self.step, 1, self.phase)}" if self.phase else ""
            return f"{text}; all ranks are equally far{where}"
        named = [f"{name_ranks([one.rank])} {words_of(one)}" for one in self.suspects]
        return f"{text}; {first_of(named, 8, between='; ')}"


def words_of(one: Standing, *, over: bool = False) -> str:
    """Describe the state of a suspect: ``has ended, in step 7``."""
    is_ = "was" if over else "is"
    words = {
        Fate.ENDED: "has ended",
        Fate.STOPPED: f"{is_} stopped, by SIGSTOP or a debugger",
        Fate.LEFT: "is not watched any more",
        Fate.MISSING: "had said nothing" if over else "never said anything",
        Fate.STUCK: f"{is_} alive and behind",
        Fate.AHEAD: f"{is_} alive and ahead, without the collective in which others wait",
        Fate.OTHER: f"{is_} alive, in a collective that does not match those of others",
        Fate.SILENT: f"{is_} behind and out of reach",
    }[one.fate]
    return words if one.place is None else f"{words}, {one.place}"


def judge_hang(
    seconds: float,
    num_workers: int,
    places: Mapping[int, CodePlace],
    states: Mapping[int, ProcessState],
    left: Iterable[int] = (),
) -> HangReport:
    """Find the ranks that hold up the others, while no rank makes progress.

    A rank whose process has ended or is stopped explains the hang, wherever it was. Without one,
    the suspects are the ranks furthest behind. Equally far ranks are not suspects, nor are all
    ranks at once when the whole job is suspended.

    ``places`` has each rank that has connected; a missing state is unknown; ranks that have
    ``left`` closed their scope normally.
    """
    gone = set(left)
    there = {rank: place for rank, place in sorted(places.items()) if rank not in gone}
    suspects = [
        *_ended_or_stopped(there, states),
        *_left(places, gone),
        *_missing(num_workers, places, gone),
    ] or _behind(there, states)
    waiting = sorted(there.keys() - {one.rank for one in suspects})
    phases = {there[rank].phase for rank in waiting}
    return HangReport(
        step=min((place.step for place in there.values()), default=0),
        seconds=seconds,
        suspects=tuple(suspects),
        waiting=tuple(waiting),
        phase=phases.pop() if len(phases) == 1 else "",
    )


def judge_stacks(report: HangReport, stacks: Mapping[int, Stack]) -> HangReport:
    """Refine a report of :func:`judge_hang` with stacks.

    If some ranks wait in a backward pass, or in a collective of the wrapper (DDP rebuilds its
    buckets and broadcasts buffers as a forward pass begins, FSDP2 gathers parameters), all ranks
    that do something else hold them up. If none does, it may be a planned pause, such as a
    checkpoint, and the report stays as it is. It also stays if there are suspects already, unless
    all ranks behind wait in one collective: then the fewer ranks ahead have skipped it. Where all
    ranks compile, nothing hangs. Ranks without a stack are left out.
    """
    known = {rank: stack for rank, stack in stacks.items() if stack["frames"]}
    if not report.recovered and (ahead := _ahead(report, known)):
        waiting = tuple(one.rank for one in report.suspects)
        return replace(report, suspects=ahead, waiting=waiting, phase="")
    compiling = all(
        any(place in frame for frame in stack["frames"] for place in _COMPILERS)
        for stack in known.values()
    )
    if known and not report.suspects and compiling:
        return replace(report, phase="")
    phases = {rank: phase for rank, stack in known.items() if (phase := _waits_in_step(stack))}
    if report.recovered or not report.is_pause or not phases:
        return report
    busy = [rank for rank in sorted(known) if not _waits(known[rank])]
    phase = next(iter(phases.values())) if len(set(phases.values())) == 1 else ""
    if busy:
        place = CodePlace(report.step)
        suspects = tuple(Standing(rank, Fate.STUCK, place) for rank in busy)
        waiting = tuple(rank for rank in report.waiting if rank not in busy)
        return replace(report, suspects=suspects, waiting=waiting, phase=phase)
    return replace(report, phase=phase) if phases.keys() >= set(report.waiting) else report


def collective_of(report: HangReport, stacks: Mapping[int, Stack]) -> HangingCollective | None:
    """Return the collective in which the ranks of these stacks hang, where it is known."""
    return hanging_collective(_recorded(stacks), report.behind)


def _recorded(stacks: Mapping[int, Stack]) -> dict[int, Collectives]:
    known = {rank: stack.get("collectives") for rank, stack in stacks.items()}
    return {rank: one for rank, one in known.items() if one is not None}


def judge_collectives(report: HangReport, stacks: Mapping[int, Stack]) -> HangReport:
    """Refine a report with what Flight Recorder holds.

    Collectives that do not match, or in which ranks wait for one another in a circle, are never
    planned, so they end a pause. A rank that has not entered the collective of the others is
    suspect unless it is a pause: it may save alone. Ranks that have ended, were stopped or left
    explain a hang better, and stay.
    """
    found = collective_of(report, stacks)
    plain = (Fate.STUCK, Fate.AHEAD)
    if report.recovered or found is None or len(report.with_fate(*plain)) < len(report.suspects):
        return report
    recorded = _recorded(stacks)
    mismatch = found.differs or bool(found.elsewhere)
    if not found.blamed or (report.is_pause and not mismatch):
        return report
    blamed = {*found.blamed, *(r for r in report.ranks if r not in recorded)}
    fate = Fate.OTHER if mismatch else Fate.STUCK
    if found.elsewhere and len(found.absent) == len(found.entered) and not report.behind:
        blamed.update(found.entered)  # two halves, and nothing shows which one went wrong
    elif report.suspects and not found.differs:
        fate = Fate.AHEAD
    known = {one.rank: one for one in report.suspects}
    new = {rank: Standing(rank, fate, CodePlace(report.step)) for rank in blamed}
    suspects = tuple((new | known)[rank] for rank in sorted(blamed))
    waiting = tuple(sorted({*report.ranks, *report.waiting} - blamed))
    phase = report.phase if set(waiting) <= set(report.waiting) else ""
    return replace(report, suspects=suspects, waiting=waiting, phase=phase)


def _ahead(report: HangReport, known: Mapping[int, Stack]) -> tuple[Standing, ...]:
    """Return the ranks that have skipped the collective in which all suspects wait."""
    behind = [one.rank for one in report.suspects]
    alive = all(one.fate is Fate.STUCK for one in report.suspects)
    places = {known[rank]["frames"][0] for rank in behind if rank in known}
    together = len(places) == 1 and all(rank in known for rank in behind)
    if not (alive and together and 0 < len(report.waiting) < len(behind)):
        return ()
    (place,) = places
    if not any(collective in place for collective in _COLLECTIVES):
        return ()
    return tuple(Standing(rank, Fate.AHEAD, CodePlace(report.step)) for rank in report.waiting)


def _ended_or_stopped(
    there: Mapping[int, CodePlace], states: Mapping[int, ProcessState]
) -> list[Standing]:
    fates = {ProcessState.ENDED: Fate.ENDED, ProcessState.STOPPED: Fate.STOPPED}
    if all(states.get(rank) == ProcessState.STOPPED for rank in there):
        return []  # the whole job is suspended; no rank waits
    found = [(rank, fates.get(states.get(rank, ProcessState.UNKNOWN))) for rank in there]
    return [Standing(rank, fate, there[rank]) for rank, fate in found if fate is not None]


def _left(places: Mapping[int, CodePlace], gone: set[int]) -> list[Standing]:
    last = max(map(_depth, places.values()), default=(0, 0))
    behind = [rank for rank in sorted(gone & places.keys()) if _depth(places[rank]) < last]
    return [Standing(rank, Fate.LEFT, places[rank]) for rank in behind]


def _missing(num_workers: int, places: Mapping[int, CodePlace], gone: set[int]) -> list[Standing]:
    """Return ranks that never connected; after a step without them no rank waits for them."""
    if any(place.step > 0 for place in places.values()):
        return []
    silent = (rank for rank in range(num_workers) if rank not in places and rank not in gone)
    return [Standing(rank, Fate.MISSING, None) for rank in silent]


def _behind(there: Mapping[int, CodePlace], states: Mapping[int, ProcessState]) -> list[Standing]:
    depths = {rank: _depth(place) for rank, place in there.items()}
    first = min(depths.values(), default=(0, 0))
    last = max(depths.values(), default=(0, 0))
    behind = [rank for rank, depth in depths.items() if depth == first != last]
    running = {rank for rank in behind if states.get(rank) == ProcessState.RUNNING}
    return [
        Standing(rank, Fate.STUCK if rank in running else Fate.SILENT, there[rank])
        for rank in behind
    ]


def _depth(place: CodePlace) -> tuple[int, int]:
    return place.step, place.passes


def _waits_in_step(stack: Stack) -> str:
    """Return the pass in which a rank waits for others; empty if it waits in none."""
    if stack["frames"][0].startswith(_ENGINE):
        return "backward"
    wrapped = any(wrapper in frame for frame in stack["frames"] for wrapper in _WRAPPERS)
    return "forward" if wrapped and _waits(stack) else ""


def _waits(stack: Stack) -> bool:
    """Return whether the innermost frame is a wait for other ranks."""
    innermost = stack["frames"][0]
    return innermost.startswith(_ENGINE) or any(place in innermost for place in _COLLECTIVES)
