"""Steps on their way to the agent: packed as soon as their numbers are on the host.

On the CPU that is at once. On an accelerator a step's numbers usually arrive by the end of the next
step; only ``flush`` waits for them, and a full queue.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.agent.frames import FrameKind
from rankscope.agent.link import Link
from rankscope.agent.step_message import pack_step, pack_values
from rankscope.bus.probe import Content, MessagePart, Pending


@dataclass(slots=True)
class LocalStep:
    """The data of one step from all probes; its numbers may still be on the device."""

    step: int
    parts: Sequence[Pending]  # the part of each kind of evidence
    # the measured gradient, left out where there is no room; None without
    bulk: Pending | None = None
    time: float = field(default_factory=time.time)  # Unix time at which the step ended

    @property
    def ready(self) -> bool:
        """Whether all of its numbers are on the host."""
        bulk = self.bulk is None or self.bulk.ready
        return bulk and all(part.ready for part in self.parts)

    def read(self, *, bulk: bool = True) -> MessagePart:
        """Wait for the device; return the parts as one, with or without ``bulk``."""
        values: dict[str, float] = {}
        arrays: dict[str, Content] = {}
        names: dict[str, Any] = {}
        items = 0
        pending = [*self.parts, self.bulk] if bulk and self.bulk is not None else self.parts
        for each in pending:
            part = each.read()
            values.update(part.values)
            arrays.update(part.arrays)
            names.update(part.names)
            items = items or part.items
        return MessagePart(values, arrays, names, items)

    def pack(self, part: MessagePart) -> list[Content]:
        """Return the message's bytes in pieces; ``part`` is what :meth:`read` returned."""
        arrays = {**part.arrays, "slots": pack_values(part.values)}
        if part.names:
            arrays["names"] = json.dumps(part.names).encode()
        return pack_step(self.step, self.time, part.items, arrays)


_log = logging.getLogger("rankscope")

MOST_PENDING = 8  # steps that may wait for their device; with more, ``send`` waits for the oldest


class Outbox:
    """Packs steps in order, and sends them; ``see`` gets each step with its values before."""

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
        self.num_sent = 0  # steps
        self.num_without_room = 0  # number of gradients left out, as the agent did not keep up

    def send(self, step: LocalStep) -> None:
        """Queue the next step; send all that are ready."""
        self._pending.append(step)
        while self._pending and (self._pending[0].ready or len(self._pending) > MOST_PENDING):
            self._hand_over(self._pending.popleft())

    def flush(self) -> None:
        """Send all steps; waits for the device."""
        while self._pending:
            self._hand_over(self._pending.popleft())

    def _hand_over(self, step: LocalStep) -> None:
        room = self._link.has_room
        if step.bulk is not None and not room:
            self._note_without_room(step.step)
        part = step.read(bulk=room)
        self._see(step.step, part)
        message = step.pack(part)
        self.num_sent += 1
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
