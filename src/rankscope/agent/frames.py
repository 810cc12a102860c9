"""Frames: what travels between probe, agent and root, one after the other on a stream.

A frame is a header (length of the payload, kind, rank, step) and a payload. The rank is the one
that a frame is from or for; -1 stands for all of them.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from rankscope.bus.probe import Content
from rankscope.errors import RankscopeError

HEADER = struct.Struct("<IHHiq")  # bytes of payload, mark, kind, rank, step
MARK = 0x5253
MAX_PAYLOAD = 1 << 30
ALL_RANKS = -1
GUESTS = 1 << 30
"""Where the numbers of guests begin, see :data:`Kind.EVIDENCE`: this plus a rank of the job."""


class FrameKind(IntEnum):
    """What a frame says."""

    # From a probe.
    HELLO = 1
    """Who this is, as JSON; the first frame of a connection."""
    STEP = 2
    """A step as :mod:`rankscope.agent.message` packs it."""
    EVIDENCE = 3
    """What the director of a kind of evidence is to get, see :func:`rankscope.agent.message.tag`;
    also from a guest, which is a rank of another run of the same mesh."""
    SUBSCRIBE = 4
    """The steps' reports are wanted from now on."""
    BYE = 5
    """No more steps follow; as JSON, why."""

    INVITATION = 6
    """How agents of other hosts reach the root; also from the root's agent to rank 0."""

    # To probes.
    WELCOME = 19
    """The number of the agent's process, which may look at this one when it hangs."""
    INTERVAL = 20
    """From a step on, gradients are measured every so many steps."""
    FINDINGS = 21
    """Findings that opened or changed, to be told at the beginning of a step."""
    REQUEST = 22
    """What a director asks of the probes of its kind."""
    LATEST = 24
    """The report of the last step that is known."""
    LOG = 25
    """A line for the log of the training."""
    OFF = 26
    """Nothing is recorded from now on, and why."""
    WORKING = 28
    """The run will be closed once the steps that wait are judged; some were just now."""
    ANNOUNCE = 29
    """A line about findings, for whoever started the training; as JSON, with its level."""
    DONE = 27
    """The run is closed; the last frame."""

    # Between agents.
    GONE = 40
    """A rank has ended without a BYE; as JSON, what is known of it."""
    STATES = 41
    """What the processes of a host do, and where they stand, as JSON."""
    LOOK = 42
    """Look at the processes of your host."""
    STACKS = 43
    """Take the stacks of the processes of your host."""
    SUMMARY = 44
    """A step of all ranks of a host, see :mod:`rankscope.agent.summary`."""
    INTRODUCE = 45
    """Introduce the ranks of your host again; the link was broken, or had no room."""


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: What it says.
        rank: Whom it is from or for; ``ALL_RANKS`` for all.
        step: The step that it is about, or from which it holds; -1 without one.
        payload: The rest.
    """

    kind: int
    rank: int
    step: int
    payload: bytes


class FrameError(RankscopeError):
    """What came in is no frame: another program, or another version, is at the other end."""


def pack(
    kind: FrameKind,
    payload: bytes | Sequence[Content] = b"",
    *,
    rank: int = ALL_RANKS,
    step: int = -1,
) -> bytes:
    """Return a frame's bytes; its payload may be in pieces."""
    pieces = (payload,) if isinstance(payload, bytes) else payload
    size = sum(map(len, pieces))
    return b"".join((HEADER.pack(size, MARK, kind, rank, step), *pieces))


class FrameReader:
    """Takes a stream apart into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Take bytes in order of arrival; return the frames that are whole by now.

        Raises:
            FrameError: They are no frames.
        """
        self._buffer += data
        frames, at = [], 0
        while len(self._buffer) - at >= HEADER.size:
            size, mark, kind, rank, step = HEADER.unpack_from(self._buffer, at)
            if mark != MARK or size > MAX_PAYLOAD:
                raise FrameError(f"expected a frame, got {bytes(self._buffer[at : at + 8])!r}")
            end = at + HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append(Frame(kind, rank, step, bytes(self._buffer[at + HEADER.size : end])))
            at = end
        if at:
            del self._buffer[:at]
        return frames
