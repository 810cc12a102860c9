"""Keys, addresses and socket options that link the agents of several hosts.

The root binds a socket and writes an :class:`Invitation`, which reaches the other agents through
the training's own store. It holds the root's addresses and a secret: only agents with the secret
can connect to the root, and only the root can answer (CURVE, in both directions).

TCP delivers bytes once and in order, also after seconds without traffic. ZeroMQ has a queue for
each connection, reads and writes in a thread of its own, and reopens a broken connection; frames
under way are then lost. The root counts incomplete steps. A host that may have missed a frame
sends the hello frames of its ranks again, and the root answers with the present state.
"""

import json
import struct
from dataclasses import dataclass, field

import zmq

from rankscope.errors import RankscopeError

VERSION = 3

HOST = struct.Struct("<I")
"""The first part of a host's message: its number. A frame follows, empty in a beat, which has a
third part."""

BEAT = struct.Struct("<Q")
"""The number of a beat. A host sends one each second, and the root sends it back."""

GOODBYE = b""
"""Instead of the number of a beat: the host's agent ends."""

MOST_AT_ONCE = 1000
"""Most frames that one call returns."""

OPTIONS = {
    zmq.IPV6: 1,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.SNDBUF: 1 << 20,  # a larger buffer would lose more with a connection
    zmq.MAXMSGSIZE: 1 << 30,
    zmq.HEARTBEAT_IVL: 5000,  # a connection on which nothing comes for so long ...
    zmq.HEARTBEAT_TIMEOUT: 30000,  # ... and this is closed, and opened again
    zmq.HEARTBEAT_TTL: 35000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.CONNECT_TIMEOUT: 2000,
    zmq.HANDSHAKE_IVL: 5000,
}


class HostsError(RankscopeError):
    """The agents of several hosts cannot be linked."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Addresses and keys to reach the root; its secret is for the job's ranks alone.

    Attributes:
        endpoints: Where the root may be reached, the most promising first.
        server_public: The root's public key.
        client_secret: The secret key of all other agents.
    """

    endpoints: tuple[str, ...]
    server_public: str
    client_secret: str = field(repr=False)

    def encode(self) -> bytes:
        """Return the bytes for the training's store."""
        return json.dumps(
            [VERSION, self.endpoints, self.server_public, self.client_secret]
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Invitation":
        """Return the invitation that :meth:`encode` has packed.

        Raises:
            HostsError: The bytes are no invitation, or of another version.
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
