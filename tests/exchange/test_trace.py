"""A trace stays on the worker that took it."""

import threading

import numpy as np
import pytest

from rankscope.core.replicas import StateKind
from rankscope.core.trace import TRACE_WIDTH, Trace
from rankscope.exchange import (
    FlatGathering,
    Layout,
    MemoryChannel,
    RootGathering,
    WorkerStep,
)

TRACE = Trace(
    (StateKind.PARAMETER,), ("w",), np.ones(1, int), np.ones(1), np.ones((1, TRACE_WIDTH), "f4")
)


@pytest.mark.parametrize("kind", [FlatGathering, RootGathering])
def test_a_trace_does_not_travel(kind):
    channels = MemoryChannel.connect(2)
    messages = [WorkerStep(0, trace=TRACE), WorkerStep(0)]
    gathered = [None, None]

    def work(rank):
        outcome = kind(channels[rank], Layout(sketch_width=0)).exchange(messages[rank], 1)
        gathered[rank] = outcome.gathered

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gathered[0].trace is TRACE
    assert gathered[1] is None or gathered[1].trace is None
    layout = Layout(sketch_width=0)
    assert len(layout.pack(messages[0])) == len(layout.pack(messages[1]))
