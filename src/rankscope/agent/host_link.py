"""The end of another host's agent of the link to the root."""

import time

import zmq

from rankscope.agent.lane import KEPT_BYTES, WINDOW_BYTES, Lane, Note, Packet
from rankscope.agent.letters import (
    MOST_AT_ONCE,
    OPTIONS,
    TURN_SECONDS,
    Invitation,
    milliseconds,
    parts_of,
    read_letter,
)

SEARCH_SECONDS = 10.0
"""After so long without a word from the root, an agent tries all of its addresses again."""

NEXT_SECONDS = 0.25
"""So long it waits for an answer before it tries the next address as well."""


class HostLink:
    """The end of another host's agent. Nothing blocks, and nothing fails while the root is away.

    Args:
        invitation: What the root has published.
        host: Number of this host among all, from 0.
        kept_bytes: What may wait until the root has confirmed it.
        window_bytes: What may be under way without confirmation.
    """

    def __init__(
        self,
        invitation: Invitation,
        host: int,
        *,
        kept_bytes: int = KEPT_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._invitation, self._host = invitation, host
        self._session = time.time_ns()
        self._lane = Lane(kept_bytes=kept_bytes, window_bytes=window_bytes, asks_when_idle=True)
        self._public = zmq.curve_public(invitation.client_secret.encode())
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._chosen: str | None = None
        self._untried: list[str] = []
        self._heard_at = self._searched_at = self._tried_at = float("-inf")
        self._search(time.monotonic())

    @property
    def silent_seconds(self) -> float:
        """How long ago the root was heard; infinity if never. A live one answers each second."""
        return time.monotonic() - self._heard_at

    @property
    def backlog_bytes(self) -> int:
        """What the root has not confirmed yet."""
        return self._lane.backlog_bytes

    def send(self, payload: bytes, *, step: int | None = None) -> bool:
        """Send a frame, or keep it until the root is in reach.

        Args:
            payload: The frame.
            step: The step that it is about; the root learns of it where the frame is refused.

        Returns:
            False where too much waits.
        """
        taken = self._lane.put(payload, step)
        if self._chosen is not None:
            self._push(time.monotonic())
        return taken

    def poll(self, timeout_seconds: float) -> list[bytes]:
        """Return frames of the root: each once, in order.

        Args:
            timeout_seconds: How long to wait for the first. Call it at least once a second.
        """
        until = time.monotonic() + timeout_seconds
        while True:
            now = time.monotonic()
            self._search(now)
            self._push(now)
            left = min(max(until - now, 0.0), TURN_SECONDS)
            ready = self._poller.poll(milliseconds(left))
            found = [payload for place, _ in ready for payload in self._receive(place)]
            if found or time.monotonic() >= until:
                self._push(time.monotonic())
                return found

    def close(self, linger_seconds: float = 0.0) -> bool:
        """Wait until the root has everything, but no longer than that, and close the sockets.

        The root hears that its own last frames have arrived: it waits for that.

        Returns:
            Whether it has.
        """
        until = time.monotonic() + linger_seconds
        lane = self._lane
        while (lane.owes_confirmation or not lane.is_empty) and time.monotonic() < until:
            self.poll(0.01)
        self._context.destroy(linger=200)
        return lane.is_empty

    def _search(self, now: float) -> None:
        """Ask at the root's addresses, one after the other, until one answers: that is chosen."""
        if now - max(self._heard_at, self._searched_at) >= SEARCH_SECONDS:
            self._searched_at = now
            self._untried = [e for e in self._invitation.endpoints if e not in self._sockets]
        if self._untried and now - self._tried_at >= NEXT_SECONDS:
            self._tried_at = now
            self._hand(self._open(self._untried.pop(0)), Packet(Note.ASK, 0))

    def _open(self, endpoint: str) -> "zmq.Socket[bytes]":
        place = self._context.socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            place.setsockopt(option, value)
        place.curve_serverkey = self._invitation.server_public.encode()
        place.curve_secretkey = self._invitation.client_secret.encode()
        place.curve_publickey = self._public
        place.connect(endpoint)
        self._sockets[endpoint] = place
        self._poller.register(place, zmq.POLLIN)
        return place

    def _receive(self, place: "zmq.Socket[bytes]") -> list[bytes]:
        found: list[bytes] = []
        while len(found) < MOST_AT_ONCE:
            try:
                letter = read_letter(place.recv_multipart(zmq.NOBLOCK))
            except zmq.ZMQError:  # nothing more, or closed since another was chosen
                return found
            if letter is None or letter.session != self._session:
                continue
            self._heard_at = time.monotonic()
            self._choose(place)
            payload = self._lane.take(letter.packet, letter.expected, self._heard_at)
            if payload is not None:
                found.append(payload)
        return found

    def _choose(self, chosen: "zmq.Socket[bytes]") -> None:
        self._untried.clear()
        if len(self._sockets) == 1 and self._chosen is not None:
            return
        for endpoint, place in list(self._sockets.items()):
            if place is chosen:
                self._chosen = endpoint
            else:
                self._poller.unregister(place)
                place.close()
                del self._sockets[endpoint]

    def _push(self, now: float) -> None:
        if self._chosen is None:
            return
        place = self._sockets[self._chosen]
        while (packet := self._lane.next(now)) is not None:
            if not self._hand(place, packet):
                return
            self._lane.handed(packet, now)

    def _hand(self, place: "zmq.Socket[bytes]", packet: Packet) -> bool:
        parts = parts_of(packet, self._host, self._session, self._lane.expected)
        try:
            place.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # no room
            return False
        return True
