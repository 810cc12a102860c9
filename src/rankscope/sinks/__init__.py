"""Where the numbers go besides the run directory: trackers, metrics servers, files, commands.

Each sink has a thread of its own, and cannot hold the training back. It gets plain numbers by name
(:class:`StepValues`) and findings; the names come from the signal registry alone
(:mod:`rankscope.sinks.base`).
"""

from rankscope.sinks.base import RunInfo, Sink, Spread, StepValues
from rankscope.sinks.hub import Sinks
from rankscope.sinks.specs import PlannedSink, SinkOption, plan_alerts, plan_sinks

__all__ = [
    "PlannedSink",
    "RunInfo",
    "Sink",
    "SinkOption",
    "Sinks",
    "Spread",
    "StepValues",
    "plan_alerts",
    "plan_sinks",
]
