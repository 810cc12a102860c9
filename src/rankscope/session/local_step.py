"""One worker's collected step, and its message."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.agent.message import pack_step, pack_values
from rankscope.bus.probe import Content, MessagePart, Pending


@dataclass(slots=True)
class LocalStep:
    """The data of one step from all probes; its numbers may still be on the device.

    Attributes:
        step: Step number.
        parts: The part of each kind of evidence.
        bulk: The measured gradient, left out where there is no room; None without.
        time: Unix time at which the step ended.
    """

    step: int
    parts: Sequence[Pending]
    bulk: Pending | None = None
    time: float = field(default_factory=time.time)

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
