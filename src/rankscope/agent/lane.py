"""One end of a lane between two agents: numbered frames, delivered once and in order.

The network may lose what it had taken when a connection breaks. So each end keeps its frames until
the other says that they have arrived, and sends them again where they have not. Nothing here does
input or output: :class:`Lane` says what is to be sent, and is told what came in.

How a loss is found: an end asks (``ASK``, with a number of its own) when nothing was confirmed for
a second, or when the other end saw a gap. Frames arrive in the order in which they were sent, if
they arrive. So once the answer is there, what was sent before the question and is not confirmed by
the answer is lost, and goes out again.
"""

import struct
from collections import deque
from enum import IntEnum
from typing import NamedTuple

KEPT_BYTES = 64 << 20
"""What may wait for its confirmation; beyond, frames are refused and their steps noted."""

WINDOW_BYTES = 4 << 20
"""What may be under way without confirmation; the other end never has to hold more."""

ASK_SECONDS = 1.0
"""After so long without confirmation an end asks what has arrived."""

CONFIRM_SECONDS = 0.2
"""A confirmation waits no longer than this for company."""

_RANGE = struct.Struct("<qq")
_OVERHEAD = 64  # of a kept frame, about


class Note(IntEnum):
    """What a frame between agents is."""

    DATA = 1
    MISSING = 2
    """Steps of which frames were refused, since too many waited."""
    ASK = 3
    ANSWER = 4
    CONFIRM = 5
    GAP = 6
    """A confirmation by an end that has seen a later frame than the next one."""


class Packet(NamedTuple):
    """A frame on its way.

    Attributes:
        note: What it is.
        number: Of DATA and MISSING: their place in the lane; of ASK and ANSWER: of the question.
        payload: The rest.
    """

    note: Note
    number: int
    payload: bytes = b""


class Lane:
    """One end of a lane.

    Args:
        kept_bytes: What may wait for its confirmation.
        window_bytes: What may be under way; a larger frame goes alone.
        asks_when_idle: Whether this end asks once in :data:`ASK_SECONDS` whatever happens, so that
            the other one knows that it lives and where.

    Attributes:
        expected: Number of the next frame from the other end; travels with every packet.
        missing: Ranges of steps ``(first, last)`` that the other end had to leave out, in order.
    """

    def __init__(
        self,
        *,
        kept_bytes: int = KEPT_BYTES,
        window_bytes: int = WINDOW_BYTES,
        asks_when_idle: bool = False,
    ) -> None:
        self.expected = 0
        self.missing: list[tuple[int, int]] = []
        self._limit, self._window, self._idle = kept_bytes, window_bytes, asks_when_idle
        self._kept: deque[Packet] = deque()
        self._first = self._next = 0  # numbers of the first that is kept, and of the next to send
        self._kept_bytes = self._flight_bytes = 0
        self._left_out: list[tuple[int, int]] = []
        self._confirmed_at = self._asked_at = float("-inf")
        self._question, self._asked_upto, self._open = 0, 0, False
        self._ask_now = False
        self._answers: deque[int] = deque(maxlen=16)
        self._owed_bytes, self._owed_since = 0, float("inf")
        self._gap_at, self._gap_due = -1, False

    @property
    def backlog_bytes(self) -> int:
        """What waits for its confirmation."""
        return self._kept_bytes

    @property
    def is_empty(self) -> bool:
        """Whether everything has arrived at the other end."""
        return not self._kept and not self._left_out

    @property
    def owes_confirmation(self) -> bool:
        """Whether the other end does not know as yet that its last frames have arrived."""
        return self._owed_bytes > 0

    # Sending ---------------------------------------------------------------------------------

    def put(self, payload: bytes, step: int | None = None) -> bool:
        """Take a frame, or refuse it and note its step where too much waits.

        Args:
            payload: What to send.
            step: The step that it is about, if any.

        Returns:
            Whether it was taken.
        """
        if self._kept and self._kept_bytes + len(payload) + _OVERHEAD > self._limit:
            if step is not None:
                self._leave_out(step)
            return False
        self._tell_missing()
        self._keep(Packet(Note.DATA, self._first + len(self._kept), payload))
        return True

    def next(self, now: float) -> Packet | None:
        """Return what should be sent now; None for nothing. Tell :meth:`handed` when it was."""
        if self._answers:
            return Packet(Note.ANSWER, self._answers[0])
        if self._should_ask(now):
            return Packet(Note.ASK, self._question + 1)
        place = self._next - self._first
        if place == len(self._kept) and self._left_out and not self._full:
            self._tell_missing()
        if place < len(self._kept):
            packet = self._kept[place]
            if not self._flight_bytes or self._flight_bytes + _size(packet) <= self._window:
                return packet
        if self._gap_due:
            return Packet(Note.GAP, 0)
        waited = now - self._owed_since >= CONFIRM_SECONDS
        if self._owed_bytes and (waited or 4 * self._owed_bytes >= self._window):
            return Packet(Note.CONFIRM, 0)
        return None

    def handed(self, packet: Packet, now: float) -> None:
        """Note that the network has taken what :meth:`next` returned."""
        self._owed_bytes, self._owed_since = 0, float("inf")  # ``expected`` travels with it
        if packet.note is Note.ANSWER:
            self._answers.popleft()
        elif packet.note is Note.ASK:
            self._question, self._asked_upto, self._asked_at = packet.number, self._next, now
            self._open, self._ask_now = True, False
        elif packet.note is Note.GAP:
            self._gap_due = False
        elif packet.note in (Note.DATA, Note.MISSING):
            if not self._flight_bytes:
                self._confirmed_at = now
            self._next += 1
            self._flight_bytes += _size(packet)

    # Receiving -------------------------------------------------------------------------------

    def take(self, packet: Packet, expected: int, now: float) -> bytes | None:
        """Take what came in.

        Args:
            packet: A packet of the other end.
            expected: What its end expected when it was sent.
            now: Seconds on a clock that never goes back.

        Returns:
            A frame that is new and in order; else None.
        """
        self._confirm(expected, now)
        if packet.note is Note.ASK:
            self._answers.append(packet.number)
        elif packet.note is Note.ANSWER:
            self._answered(packet.number, expected)
        elif packet.note is Note.GAP:
            self._ask_now = not self._open
        elif packet.note in (Note.DATA, Note.MISSING) and self._is_next(packet, now):
            if packet.note is Note.DATA:
                return packet.payload
            self.missing += _RANGE.iter_unpack(packet.payload)
        return None

    def _is_next(self, packet: Packet, now: float) -> bool:
        if not self._owed_bytes:
            self._owed_since = now
        self._owed_bytes += _size(packet)
        if packet.number == self.expected:
            self.expected += 1
            return True
        if packet.number > self.expected and self._gap_at != self.expected:
            self._gap_at, self._gap_due = self.expected, True
        return False

    def _confirm(self, expected: int, now: float) -> None:
        while self._kept and self._first < expected:
            size = _size(self._kept.popleft())
            self._kept_bytes -= size
            if self._first < self._next:
                self._flight_bytes -= size
            self._first += 1
            self._confirmed_at = now
        self._next = max(self._next, self._first)

    def _answered(self, number: int, expected: int) -> None:
        if not self._open or number != self._question:
            return
        self._open = False
        if self._first <= expected < self._asked_upto:
            self._next = expected
            self._flight_bytes = 0

    def _should_ask(self, now: float) -> bool:
        if self._ask_now:
            return True
        if now - self._asked_at < ASK_SECONDS:
            return False
        under_way = self._next > self._first and now - self._confirmed_at >= ASK_SECONDS
        return under_way or self._idle

    # What is kept, and what was refused -----------------------------------------------------

    @property
    def _full(self) -> bool:
        return self._kept_bytes + _OVERHEAD > self._limit

    def _keep(self, packet: Packet) -> None:
        self._kept.append(packet)
        self._kept_bytes += _size(packet)

    def _leave_out(self, step: int) -> None:
        if self._left_out and 0 <= step - self._left_out[-1][1] <= 1:
            self._left_out[-1] = (self._left_out[-1][0], step)
        else:
            self._left_out.append((step, step))

    def _tell_missing(self) -> None:
        if self._left_out:
            payload = b"".join(_RANGE.pack(*each) for each in self._left_out)
            self._keep(Packet(Note.MISSING, self._first + len(self._kept), payload))
            self._left_out.clear()


def _size(packet: Packet) -> int:
    return len(packet.payload) + _OVERHEAD
