"""Which modules are in training mode on some workers, and in evaluation mode on others."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.judge import Columns, Combiner, Message
from rankscope.bus.layout import Layout
from rankscope.bus.rank_values import name_values
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import MISSING_INT
from rankscope.bus.words import name_modules

_NAMES = "modes"
_MODES = ("evaluation", "training")


class ComparedModes(Combiner):
    """Compares the modes of all workers' modules; a worker sends those that have changed."""

    def __init__(self) -> None:
        self._modes: dict[int, dict[str, int]] = {}

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Return the differences: one for all modules that differ between the same workers."""
        digests_W = columns["modes"]
        if (digests_W == MISSING_INT).all():
            return {}
        for rank, message in enumerate(messages_W):
            named = json.loads(message.names.tobytes()) if len(message.names) else {}
            if _NAMES in named:
                names, flags = named[_NAMES]
                self._modes[rank] = dict(zip(names, map(int, flags), strict=False))
        if (digests_W == digests_W[0]).all() or (digests_W == MISSING_INT).any():
            return {}
        modes_W = [self._modes.get(rank, {}) for rank in range(len(messages_W))]
        alike: dict[tuple[int, ...], list[str]] = {}
        for name in modes_W[0]:
            if all(name in modes for modes in modes_W):
                flags_W = tuple(modes[name] for modes in modes_W)
                if len(set(flags_W)) > 1:
                    alike.setdefault(flags_W, []).append(name)
        none_W = np.zeros(len(messages_W), bool)
        found = [
            StateDifference(
                StateKind.MODE,
                f"{name_modules(names, modes_W[0])} ({name_values(flags_W, _MODES.__getitem__)})",
                np.array(flags_W, np.int64),
                none_W,
            )
            for flags_W, names in alike.items()
        ]
        return {"differences": tuple(found)}


def make_combiner(layout: Layout) -> ComparedModes:
    """Return the combiner of modes."""
    return ComparedModes()
