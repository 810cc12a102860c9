"""The entries of torch's Flight Recorder, which the agent reads while a training hangs.

The training's thread is blocked then. So a rank whose recorder is on has one more thread, which
sleeps in a system call until the agent requests the entries; it writes them into memory that the
agent has opened, too. Only torch's JSON form is read, and no file is written. A dump of NCCL's
recorder queries events of the device; where that blocks, this thread alone waits.
"""

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

_NAME = "rankscope-collectives"
_REQUEST, _END = b"?", b"."
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
    ranks: list[int]  # its global ranks; empty if the recorder does not know them
    entries: list[Entry]  # its last collectives, in order


class Collectives(TypedDict):
    """What one rank's recorder holds."""

    rank: int  # the global rank
    groups: dict[str, Group]  # process groups by name; a name is the same on all ranks


class Numbers(NamedTuple):
    """The descriptors of a :class:`RecorderThread`, for the hello frame."""

    request: int
    answer: int


class RecorderThread:
    """The training's end.

    ``dumps`` returns what the recorders hold, each in torch's JSON form.
    """

    def __init__(self, rank: int, dumps: Callable[[], Sequence[bytes]]) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._rank = rank
        self._dumps = dumps
        requests, request = os.pipe2(os.O_CLOEXEC)
        answer = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(answer, mmap.PAGESIZE)
        self.numbers = Numbers(request, answer)
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
            return json.dumps(read_dumps(self._rank, self._dumps())).encode()
        except Exception:  # another release's form, or torch's own error
            return b"null"

    def _owns(self, descriptor: int) -> bool:
        """Return whether it is still ours: a script may close all files that it does not know."""
        return os.fstat(descriptor).st_ino == self._identities[descriptor]


def read_dumps(rank: int, dumps: Iterable[bytes]) -> Collectives:
    """Return the last collectives of each process group; sends and receives are left out.

    Each dump is in torch's JSON form.
    """
    groups: dict[str, Group] = {}
    for dump in dumps:
        content = json.loads(dump)
        for one in content.get("entries", ()):
            name, described = one["process_group"]
            config = content.get("pg_config", {}).get(name, {})
            ranks = json.loads(config.get("ranks") or "[]")
            title = f"group {name}" if described in ("", "undefined") else described
            group = groups.setdefault(name, Group(title=title, ranks=ranks, entries=[]))
            if not one["is_p2p"]:
                group["entries"].append(_entry(one))
    for group in groups.values():
        group["entries"] = _joined(group["entries"])[-_MOST_ENTRIES:]
    return Collectives(rank=rank, groups=groups)


class Reader:
    """The agent's end, of another process of this user.

    ``numbers`` are that process's own descriptors, from its hello frame.
    """

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
        """Return the requested entries; None if they do not come. Blocks meanwhile.

        ``until`` is a time of ``time.monotonic()``.
        """
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
    """Open a file that another process of this user has open as ``number``; an OSError without.

    ``kind`` is the beginning of its name in ``/proc``.
    """
    descriptor = os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC)
    if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(kind):
        os.close(descriptor)
        raise OSError(f"expected {kind}, got another file")
    return descriptor


def _entry(one: dict[str, object]) -> Entry:
    """Return an entry of torch's, whose operation is ``nccl:all_reduce``, say."""
    operation = str(one["profiling_name"]).partition(":")[2]
    sizes, types = ("output_sizes", "output_dtypes")
    if operation != "scatter":
        sizes, types = ("input_sizes", "input_dtypes")
    ended = bool(one["retired"]) or one["state"] == "completed"
    return int(str(one["collective_seq_id"])), operation, one[sizes], one[types], ended  # type: ignore[return-value]


def _joined(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries by number; those of one number, as of coalesced calls, are one."""
    by_number: dict[int, Entry] = {}
    for number, operation, shapes, types, ended in entries:
        first = by_number.get(number, (number, operation, [], [], True))
        joined = (number, first[1], [*first[2], *shapes], [*first[3], *types], first[4] and ended)
        by_number[number] = joined
    return [by_number[number] for number in sorted(by_number)]
