"""The links between the agents of several hosts: ZeroMQ sockets, encrypted, with lanes on top.

The root binds a socket and writes an :class:`Invitation`, which reaches the other agents through
the training's own store. It names the root's addresses and holds a secret: only who knows that can
talk to the root, and only the root can answer (CURVE, in both directions). ZeroMQ connects, again
and again where it must; a :class:`~rankscope.agent.lane.Lane` makes up for what was lost meanwhile.

A link belongs to one thread. ZeroMQ reads and writes in a thread of its own, in C.
"""

from rankscope.agent.host_link import HostLink
from rankscope.agent.letters import HostsError, Invitation
from rankscope.agent.root_link import RootLink

__all__ = ["HostLink", "HostsError", "Invitation", "RootLink"]
