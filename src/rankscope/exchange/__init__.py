"""The only place that communicates: one fixed-size gather per step on a channel of its own."""

from rankscope.exchange.channel import Channel, ChannelError, GlooChannel, Hello
from rankscope.exchange.courier import Courier
from rankscope.exchange.local import LocalStep
from rankscope.exchange.memory import MemoryChannel
from rankscope.exchange.payload import Goodbye, Layout, PayloadError, WorkerStep

__all__ = [
    "Channel",
    "ChannelError",
    "Courier",
    "GlooChannel",
    "Goodbye",
    "Hello",
    "Layout",
    "LocalStep",
    "MemoryChannel",
    "PayloadError",
    "WorkerStep",
]
