"""The link to the root, at the end of another host's agent."""

import contextlib
import time
from collections import deque
from math import inf

import zmq

from rankscope.agent.hosts import BEAT, GOODBYE, HOST, MOST_AT_ONCE, OPTIONS, Invitation

QUEUED_FRAMES = 100
"""Frames in ZeroMQ's queue; further ones wait in a queue of ours, whose bytes are counted."""

MOST_BYTES = 64 << 20
"""With a longer queue, steps are dropped."""

BEAT_SECONDS = 1.0
"""Seconds from one beat to the next."""

SEARCH_SECONDS = 30.0
"""After this long without a frame from the root, an agent tries all of its addresses again."""

NEXT_SECONDS = 0.25
"""Seconds to wait for an answer before the next address is tried as well."""


class HostLink:
    """The link of host number ``host`` to the root; never blocks or fails while the root is away.

    At most ``most_bytes`` may wait in its queue; ``backlog_bytes`` do.
    """

    def __init__(self, host: int, *, most_bytes: int = MOST_BYTES) -> None:
        self._name = HOST.pack(host)
        self._most_bytes = most_bytes
        self._invitation: Invitation | None = None
        self._line: deque[bytes] = deque()
        self.backlog_bytes = 0
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._chosen: zmq.Socket[bytes] | None = None
        self._untried: list[str] = []
        self._beat = self._answered = 0  # numbers of the last beat, and of the last that came back
        self._received_at = self._searched_at = self._tried_at = self._beat_at = -inf

    def open(self, invitation: bytes) -> None:
        """Start to search for the root by its invitation; frames wait until the root answers.

        Raises:
            HostsError: It is no invitation, or of another version.
        """
        self._invitation = Invitation.decode(invitation)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last frame from the root, which answers each beat; infinity: none."""
        return time.monotonic() - self._received_at

    def send(self, frame: bytes, *, lasting: bool = False) -> bool:
        """Send or queue a frame; return False if it was dropped. A lasting one never is."""
        if not lasting and self.backlog_bytes + len(frame) > self._most_bytes:
            return False
        self._line.append(frame)
        self.backlog_bytes += len(frame)
        self._push()
        return True

    def poll(self) -> list[bytes]:
        """Return new frames from the root. Call it at least once a second."""
        now = time.monotonic()
        self._search(now)
        places = tuple(self._sockets.values())
        found = [frame for place in places for frame in self._receive(place)]
        self._push()
        if self._chosen is not None and now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._send_beat(self._chosen)
        return found

    def close(self, linger_seconds: float = 0.0) -> bool:
        """Wait up to so long until the root has read all frames, close; return whether it has."""
        until = time.monotonic() + linger_seconds
        while self._line and time.monotonic() < until:
            self._wait()
        last = self._beat + 1
        self._beat_at = -inf
        while self._answered < last and time.monotonic() < until:
            self._wait()
        if self._chosen is not None:
            self._hand(self._chosen, b"", GOODBYE)
            self._chosen = None
        self._context.destroy(linger=200)
        return not self._line and self._answered >= last

    def _wait(self) -> None:
        self.poll()  # incoming frames are dropped now
        time.sleep(0.01)

    def _search(self, now: float) -> None:
        """Try the root's addresses, one after the other; the first that answers is chosen."""
        if self._invitation is None:
            return
        if now - max(self._received_at, self._searched_at) >= SEARCH_SECONDS:
            self._searched_at = now
            self._untried = [e for e in self._invitation.endpoints if e not in self._sockets]
        if self._untried and now - self._tried_at >= NEXT_SECONDS:
            self._tried_at = now
            self._send_beat(self._open(self._untried.pop(0), self._invitation))

    def _open(self, endpoint: str, invitation: Invitation) -> "zmq.Socket[bytes]":
        place = self._context.socket(zmq.DEALER)
        for option, value in {**OPTIONS, zmq.SNDHWM: QUEUED_FRAMES}.items():
            place.setsockopt(option, value)
        place.curve_serverkey = invitation.server_public.encode()
        secret = invitation.client_secret.encode()
        place.curve_secretkey = secret
        place.curve_publickey = zmq.curve_public(secret)
        place.connect(endpoint)
        self._sockets[endpoint] = place
        return place

    def _receive(self, place: "zmq.Socket[bytes]") -> list[bytes]:
        found: list[bytes] = []
        with contextlib.suppress(zmq.ZMQError):  # no more frames, or another socket was chosen
            while len(found) < MOST_AT_ONCE:
                frame, *beat = place.recv_multipart(zmq.NOBLOCK)
                self._received_at = time.monotonic()
                self._choose(place)
                if beat:
                    self._answered = max(self._answered, *BEAT.unpack(beat[0]))
                else:
                    found.append(frame)
        return found

    def _choose(self, chosen: "zmq.Socket[bytes]") -> None:
        self._untried.clear()
        self._chosen = chosen
        for endpoint, place in list(self._sockets.items()):
            if place is not chosen:
                place.close(linger=0)
                del self._sockets[endpoint]

    def _push(self) -> None:
        while self._line and self._chosen is not None and self._hand(self._chosen, self._line[0]):
            self.backlog_bytes -= len(self._line.popleft())

    def _send_beat(self, place: "zmq.Socket[bytes]") -> None:
        self._beat += 1
        self._hand(place, b"", BEAT.pack(self._beat))

    def _hand(self, place: "zmq.Socket[bytes]", *parts: bytes) -> bool:
        try:
            place.send_multipart([self._name, *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True
