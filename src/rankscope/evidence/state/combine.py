"""From all workers' digests to the state that differs between them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.bus.judge import Columns, Combiner, Message
from rankscope.bus.layout import Layout
from rankscope.bus.replicas import (
    TRACE_WIDTH,
    StateDifference,
    StateDigests,
    StateKind,
    TensorTrace,
    differences,
)
from rankscope.evidence.state.roles import (
    UnchangedParameters,
    changed_gradients,
    moved_in_passes,
    owned_names,
    role_differences,
    unchanged_differences,
)
from rankscope.stats.arrays import Ints

MOST_AGAIN = 4
"""Differences of one kind in a step, besides new ones: one is enough to prove that it lasts."""

_Kinds = tuple[StateKind, ...]
_Named = tuple[_Kinds, tuple[str, ...]]


class ComparedState(Combiner):
    """Compares the digests of all workers; the first worker sends their names once."""

    def __init__(self) -> None:
        self._names: dict[int, _Named] = {}
        self._unchanged = UnchangedParameters()
        self._recorded: set[tuple[StateKind, str, bool]] = set()
        self._owned: frozenset[str] | None = None  # names of parameters that some optimizer holds

    def learn(self, rank: int, message: Message) -> None:
        """Learn names from a message that has just arrived."""
        if rank != 0 or not len(message.names):
            return
        named = json.loads(message.names.tobytes())
        for items, kinds, names in named.get("items", ()):
            self._names[int(items)] = tuple(map(StateKind, kinds)), tuple(names)

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Return the differences, and the first worker's traced tensors."""
        named = self._named_differences(messages_W)
        found = (
            *self.new_or_few(self._differences(messages_W, columns["replica"])),
            *self._unchanged_parameters(messages_W, columns),
            *self.new_or_few(named),
        )
        return {"differences": found, "trace": self._trace(messages_W[0])}

    def new_or_few(self, found: Iterable[StateDifference]) -> Iterator[StateDifference]:
        """Yield the differences that no step had before, and a few of the others.

        So the record has each tensor once at least, and does not grow with all of them.
        """
        again: Counter[StateKind] = Counter()
        for one in found:
            key = one.kind, one.name, bool(one.unchanged_W.any())
            again[one.kind] += key in self._recorded
            if key not in self._recorded or again[one.kind] <= MOST_AGAIN:
                yield one
            self._recorded.add(key)

    def _differences(self, messages_W: Sequence[Message], replicas_W: Ints) -> Any:
        first = messages_W[0]
        if first.items not in self._names or any(m.items != first.items for m in messages_W):
            return ()
        kinds, names = self._names[first.items]
        own = StateDigests(kinds, names, first.digests_D, first.unchanged_D.astype(bool))
        return differences(
            own,
            np.stack([message.digests_D for message in messages_W]),
            np.stack([message.unchanged_D for message in messages_W]).astype(bool),
            replicas_W,
        )

    def _unchanged_parameters(
        self, messages_W: Sequence[Message], columns: Columns
    ) -> tuple[StateDifference, ...]:
        """Return the parameters of the first worker that do not change."""
        first = messages_W[0]
        kinds, names = self._names.get(first.items, ((), ()))
        if len(kinds) != len(first.digests_D):
            return ()
        updates = bool(columns["optimizer_steps"][0] > 0 and columns["lr"][0] > 0)
        digests = first.digests_D.tolist()
        found = self._unchanged.see(
            first.step, kinds, names, digests, updates=updates, owned=self._owned
        )
        return unchanged_differences(found, len(messages_W))

    def _named_differences(self, messages_W: Sequence[Message]) -> tuple[StateDifference, ...]:
        """Return gradients that changed otherwise than most, and roles where all have sent them."""
        if not any(len(message.names) for message in messages_W):
            return ()
        names_W = [json.loads(m.names.tobytes()) if len(m.names) else {} for m in messages_W]
        changed = changed_gradients([names.get("changed", ()) for names in names_W])
        moved = moved_in_passes([names.get("passes", ()) for names in names_W])
        roles_W = [names["roles"] for names in names_W if names.get("roles")]
        if len(roles_W) < len(names_W):
            return (*changed, *moved)
        self._owned = owned_names(roles_W)
        return (*changed, *moved, *role_differences(roles_W))

    def _trace(self, message: Message) -> TensorTrace | None:
        """Return the first worker's traced tensors, if there are any."""
        if not len(message.traced_digests_N):
            return None
        named = json.loads(message.names.tobytes())["traced"]
        parts = {
            what: (tuple(map(StateKind, kinds)), tuple(names))
            for what, (kinds, names) in named.items()
        }
        initial = parts.get("initial")
        count = 0 if initial is None else len(initial[0])
        before = None if initial is None else _tensors(message, *initial, 0)
        return replace(_tensors(message, *parts["own"], count), initial=before)


def make_combiner(layout: Layout) -> ComparedState:
    """Return the combiner of digests."""
    return ComparedState()


def _tensors(message: Message, kinds: _Kinds, names: tuple[str, ...], begin: int) -> TensorTrace:
    rows = slice(begin, begin + len(kinds))
    sketches = message.traced_sketches.reshape(-1, TRACE_WIDTH)
    return TensorTrace(
        kinds, names, message.traced_digests_N[rows], message.traced_norms_N[rows], sketches[rows]
    )
