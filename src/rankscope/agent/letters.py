"""What the agents of several hosts send each other, and what one must know to take part."""

import json
import math
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from rankscope.agent.lane import Note, Packet
from rankscope.errors import RankscopeError

VERSION = 1

_NOTES = frozenset(Note)
_HEADER = struct.Struct("<BBHIQQQ")  # version, note, unused, host, session, number, expected

TURN_SECONDS = 0.05
"""Between two looks at lanes of which nothing was heard."""

MOST_AT_ONCE = 1000
"""Frames that one call returns."""

OPTIONS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.MAXMSGSIZE: 1 << 30,
    zmq.HEARTBEAT_IVL: 2000,  # a connection that says nothing for so long ...
    zmq.HEARTBEAT_TIMEOUT: 6000,  # ... and this is closed, and opened again
    zmq.HEARTBEAT_TTL: 10000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.CONNECT_TIMEOUT: 2000,
    zmq.HANDSHAKE_IVL: 5000,
}


class HostsError(RankscopeError):
    """The agents of several hosts cannot be linked."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What an agent must know to reach the root; the secret in it is for the job's ranks alone.

    Attributes:
        endpoints: Where the root may be reached, the most promising first.
        server_public: The root's public key.
        client_secret: The secret key of all other agents.
    """

    endpoints: tuple[str, ...]
    server_public: str
    client_secret: str = field(repr=False)

    def encode(self) -> bytes:
        """Return it as bytes for the training's store."""
        return json.dumps(
            [VERSION, self.endpoints, self.server_public, self.client_secret]
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Invitation":
        """Return what :meth:`encode` was called on.

        Raises:
            HostsError: It is something else, or of another version.
        """
        try:
            version, endpoints, public, secret = json.loads(content)
        except (ValueError, TypeError):
            version = None
        if version != VERSION:
            raise HostsError(
                f"expected an invitation of version {VERSION}, got {content[:4]!r}…: two versions "
                "of rankscope are at work; install the same one for all ranks"
            )
        return cls(tuple(endpoints), public, secret)


class Letter(NamedTuple):
    """A packet with its header read.

    Attributes:
        host: Number of the host, at either end.
        session: When the host's agent was started, in nanoseconds: tells agents of a host apart.
        packet: The packet.
        expected: Number of the frame that the sender expects next.
    """

    host: int
    session: int
    packet: Packet
    expected: int


def parts_of(packet: Packet, host: int, session: int, expected: int) -> list[bytes]:
    """Return a packet of a host's lane as a message's parts."""
    header = _HEADER.pack(VERSION, packet.note, 0, host, session, packet.number, expected)
    return [header, packet.payload] if packet.payload else [header]


def read_letter(parts: list[bytes]) -> Letter | None:
    """Return what :func:`parts_of` was given; None of something else, or of another version."""
    if not 1 <= len(parts) <= 2 or len(parts[0]) != _HEADER.size:
        return None
    version, note, _, host, session, number, expected = _HEADER.unpack(parts[0])
    if version != VERSION or note not in _NOTES:
        return None
    payload = parts[1] if len(parts) == 2 else b""
    return Letter(host, session, Packet(Note(note), number, payload), expected)


def milliseconds(seconds: float) -> int:
    """Return a time to wait as ZeroMQ takes it: not 0 but for 0."""
    return math.ceil(1000 * seconds)
