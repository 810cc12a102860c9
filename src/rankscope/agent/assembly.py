"""Assembles the messages of W workers into common steps, in order.

A step is complete when every worker has delivered it.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rankscope.agent.message import StepMessage, unpack_columns
from rankscope.bus.layout import Layout
from rankscope.bus.step import GatheredStep
from rankscope.evidence import EVIDENCE

_log = logging.getLogger("rankscope")

_AMEND = [amend for each in EVIDENCE if (amend := each.find("combine", "amend")) is not None]


class Assembly:
    """Collects the workers' messages until a step is complete."""

    def __init__(self, layout: Layout, first_step: int) -> None:
        self._layout = layout
        self.next_step = first_step
        self.newest = first_step - 1
        self.lost: list[int] = []
        """Steps of which some worker's message was lost."""
        self.lost_of: Counter[int] = Counter()
        """Number of lost messages by rank."""
        self._queues: list[deque[StepMessage | None]]
        self._queues = [deque() for _ in range(layout.num_workers)]
        self._delivered = [first_step - 1] * layout.num_workers
        made = (each.find("combine", "make_combiner") for each in EVIDENCE)
        self._combiners = [make(layout) for make in made if make is not None]

    @property
    def delivered(self) -> tuple[int, ...]:
        """The last step that each worker has delivered ``[W]``."""
        return tuple(self._delivered)

    @property
    def num_whole(self) -> int:
        """Number of complete steps that wait to be taken."""
        return min(map(len, self._queues))

    def add(self, rank: int, message: StepMessage) -> None:
        """Add a message; a repeated one is ignored."""
        if message.step <= self._delivered[rank]:
            return
        gap = message.step - self._delivered[rank] - 1
        if gap:
            self._note_lost(rank, message.step, gap)
        self._queues[rank].extend([None] * gap)  # lost on the way from another host
        self._delivered[rank] = message.step
        self.newest = max(self.newest, message.step)
        for combiner in self._combiners:
            combiner.learn(rank, message)
        self._queues[rank].append(message)

    def _note_lost(self, rank: int, step: int, gap: int) -> None:
        if not self.lost_of:
            _log.warning(
                "rank %d: its data up to step %d was lost on the way, of %d steps, which are not "
                "recorded: the link to its host was broken or too slow. This warning is not "
                "repeated; run.json counts the lost messages of each rank",
                rank,
                step - 1,
                gap,
            )
        self.lost_of[rank] += gap

    def take(self, most: int) -> list[list[StepMessage]]:
        """Return the messages of the next complete steps, of at most ``most`` steps."""
        steps: list[list[StepMessage]] = []
        while len(steps) < most and all(self._queues):
            step = self.next_step
            self.next_step += 1
            messages = [queue.popleft() for queue in self._queues]
            whole = [message for message in messages if message is not None]
            if len(whole) == len(messages):
                steps.append(whole)
            else:
                self.lost.append(step)
        return steps

    def step_of(self, messages_W: Sequence[StepMessage], interval: int) -> GatheredStep:
        """Merge the messages of all workers into one step."""
        columns = unpack_columns([message.slots for message in messages_W])
        fields: dict[str, Any] = {}
        for combiner in self._combiners:
            for name, value in combiner.combine(messages_W, columns).items():
                fields[name] = fields[name] + value if name in fields else value
        times = [each.time for each in messages_W if math.isfinite(each.time)]
        gathered = GatheredStep(
            step=messages_W[0].step,
            time=max(times, default=time.time()),
            workers=columns,
            interval=interval,
            **fields,
        )
        for amend in _AMEND:
            gathered = amend(gathered)
        return gathered
