"""Steps on their way to the agent: packed as soon as their numbers are on the host.

On the CPU that is at once. On an accelerator a step's numbers usually arrive by the end of the next
step; only ``flush`` waits for them, and a full queue.
"""

import logging
from collections import deque
from collections.abc import Callable

from rankscope.agent.frames import FrameKind
from rankscope.agent.link import Link
from rankscope.bus.probe import MessagePart
from rankscope.session.local_step import LocalStep

_log = logging.getLogger("rankscope")

MOST_PENDING = 8
"""Steps that may wait for their device; with more, ``send`` waits for the oldest."""


class Outbox:
    """Packs steps in order, and sends them.

    Args:
        link: The link to the agent.
        rank: This worker's rank.
        see: Called with each step and its values before it is sent.

    Attributes:
        num_without_room: Number of gradients left out, as the agent did not keep up.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        see: Callable[[int, MessagePart], None] = lambda step, part: None,
    ) -> None:
        self._link = link
        self._rank = rank
        self._see = see
        self._pending: deque[LocalStep] = deque()
        self.num_without_room = 0

    def send(self, step: LocalStep) -> None:
        """Queue the next step; send all that are ready.

        Raises:
            LinkError: The agent has ended, or no longer reads.
        """
        self._pending.append(step)
        while self._pending and (self._pending[0].ready or len(self._pending) > MOST_PENDING):
            self._hand_over(self._pending.popleft())

    def flush(self) -> None:
        """Send all steps; waits for the device.

        Raises:
            LinkError: The agent has ended, or no longer reads.
        """
        while self._pending:
            self._hand_over(self._pending.popleft())

    def _hand_over(self, step: LocalStep) -> None:
        room = self._link.has_room
        if step.bulk is not None and not room:
            self._note_without_room(step.step)
        part = step.read(bulk=room)
        self._see(step.step, part)
        message = step.pack(part)
        self._link.send(FrameKind.STEP, message, rank=self._rank, step=step.step)

    def _note_without_room(self, step: int) -> None:
        self.num_without_room += 1
        if self.num_without_room == 1:
            _log.warning(
                "the monitor's agent does not keep up with rank %d: the gradient of step %d is not "
                "measured, nor are others while that lasts. This warning is not repeated; run.json "
                "counts the steps",
                self._rank,
                step,
            )
