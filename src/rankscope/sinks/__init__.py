"""Where the numbers go besides the run directory: trackers, metrics servers, files, commands.

Each sink has a thread of its own, and nothing that it does can hold the training back. What a
sink gets are plain numbers by name (:class:`StepValues`) and findings; how they are named is told
by the signal registry alone (:mod:`rankscope.sinks.base`).
"""

from rankscope.sinks.base import RunInfo, Sink, Spread, StepValues
from rankscope.sinks.hub import Sinks
from rankscope.sinks.specs import PlannedSink, SinkOption, plan_sinks

__all__ = [
    "PlannedSink",
    "RunInfo",
    "Sink",
    "SinkOption",
    "Sinks",
    "Spread",
    "StepValues",
    "plan_sinks",
]
