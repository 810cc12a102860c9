"""The only place that communicates: one fixed-size gather per step on a channel of its own."""

from rankscope.exchange.channel import Channel, ChannelError, GlooChannel, Hello, Traffic
from rankscope.exchange.courier import Courier
from rankscope.exchange.exact import ExactGram, check_exact, pack_share
from rankscope.exchange.gathering import (
    MAX_PAIRED,
    FlatGathering,
    Gathering,
    Outcome,
    RootGathering,
    choose_gathering,
)
from rankscope.exchange.local import LocalStep
from rankscope.exchange.memory import MemoryChannel
from rankscope.exchange.payload import Goodbye, Layout, PayloadError, WorkerStep

__all__ = [
    "MAX_PAIRED",
    "Channel",
    "ChannelError",
    "Courier",
    "ExactGram",
    "FlatGathering",
    "Gathering",
    "GlooChannel",
    "Goodbye",
    "Hello",
    "Layout",
    "LocalStep",
    "MemoryChannel",
    "Outcome",
    "PayloadError",
    "RootGathering",
    "Traffic",
    "WorkerStep",
    "check_exact",
    "choose_gathering",
    "pack_share",
]
