"""Which modules are in another mode on some workers, and which settings have another value."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.messages import Columns, Combiner, Layout, Messages
from rankscope.bus.replicas import StateDifference, StateKind, name_values
from rankscope.bus.step import MISSING_INT
from rankscope.bus.words import name_modules
from rankscope.evidence.environment import MODES, SETTINGS
from rankscope.stats.arrays import Ints

_MODE_NAMES = ("evaluation", "training")
_MISSING = "not set"


class ComparedNames(Combiner):
    """Compares all workers' modes of modules and settings of the optimizer, by name.

    A worker sends those that have changed. Modes that differ are a difference of every step in
    which they are read, settings that differ one of the step in which they begin to.
    """

    def __init__(self) -> None:
        self._modes: dict[int, dict[str, int]] = {}
        self._settings: dict[int, dict[str, str]] = {}

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return the differences, in words; modules that differ between the same workers as one."""
        new_settings = False
        for rank, named in enumerate(messages.named):
            if MODES in named:
                names, flags = named[MODES]
                self._modes[rank] = dict(zip(names, map(int, flags), strict=False))
            if SETTINGS in named:
                self._settings[rank] = named[SETTINGS]
                new_settings = True
        found: list[StateDifference] = []
        if _differs(columns["modes"]):
            found += self._different_modes(len(messages))
        if new_settings and _differs(columns["settings_digest"]):
            found += self._different_settings(len(messages))
        return {"differences": tuple(found)} if found else {}

    def _different_modes(self, num_workers: int) -> list[StateDifference]:
        modes_W = [self._modes.get(rank, {}) for rank in range(num_workers)]
        alike: dict[tuple[int, ...], list[str]] = {}
        for name in modes_W[0]:
            if all(name in modes for modes in modes_W):
                flags_W = tuple(modes[name] for modes in modes_W)
                if len(set(flags_W)) > 1:
                    alike.setdefault(flags_W, []).append(name)
        return [
            _difference(
                StateKind.MODE,
                f"{name_modules(names, modes_W[0])} "
                f"({name_values(flags_W, _MODE_NAMES.__getitem__)})",
                flags_W,
            )
            for flags_W, names in alike.items()
        ]

    def _different_settings(self, num_workers: int) -> list[StateDifference]:
        settings_W = [self._settings.get(rank) for rank in range(num_workers)]
        found = []
        for name in dict.fromkeys(name for each in settings_W if each for name in each):
            values_W = [None if each is None else each.get(name, _MISSING) for each in settings_W]
            values = list(dict.fromkeys(value for value in values_W if value is not None))
            if len(values) > 1:
                numbers_W = [-1 if value is None else values.index(value) for value in values_W]
                words = f"{name} is {name_values(values_W)}"
                found.append(_difference(StateKind.OPTION, words, numbers_W))
        return found


def _differs(digests_W: Ints) -> bool:
    known_W = digests_W != MISSING_INT
    return bool(known_W.all() and (digests_W != digests_W[0]).any())


def _difference(kind: StateKind, words: str, values_W: Sequence[int]) -> StateDifference:
    none_W = np.zeros(len(values_W), bool)
    return StateDifference(kind, words, np.array(values_W, np.int64), none_W)


def make_combiner(layout: Layout) -> ComparedNames:
    """Return the combiner of modes and settings."""
    return ComparedNames()
