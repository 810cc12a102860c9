"""From all workers' digests to the state that differs between them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from rankscope.bus.messages import Columns, Combiner, Layout, Message, Messages
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
    replaced_differences,
    role_differences,
    unchanged_differences,
)
from rankscope.stats.arrays import Ints, Ragged

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
        self._roles_W: Sequence[Mapping[str, Any]] = ()  # as they were read last

    def learn(self, rank: int, message: Message) -> None:
        """Learn names from a message that has just arrived."""
        if rank != 0 or not len(message.names):
            return
        named = json.loads(message.names.tobytes())
        for items, kinds, names in named.get("items", ()):
            self._names[int(items)] = tuple(map(StateKind, kinds)), tuple(names)

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return the differences, and the first worker's traced tensors."""
        named = self._named_differences(messages.named)
        found = (
            *self.new_or_few(self._differences(messages, columns["replica"])),
            *self._unchanged_parameters(messages, columns),
            *self.new_or_few(named),
        )
        return {"differences": found, "trace": _trace(messages)}

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

    def _differences(self, messages: Messages, replicas_W: Ints) -> Any:
        items_W = messages.items_W
        if int(items_W[0]) not in self._names or (items_W != items_W[0]).any():
            return ()
        kinds, names = self._names[int(items_W[0])]
        digests_WD = messages["digests_D"].matrix
        unchanged_WD = messages["unchanged_D"].matrix.astype(bool)
        own = StateDigests(kinds, names, digests_WD[0], unchanged_WD[0])
        return differences(own, digests_WD, unchanged_WD, replicas_W)

    def _unchanged_parameters(
        self, messages: Messages, columns: Columns
    ) -> tuple[StateDifference, ...]:
        """Return the parameters of the first worker that do not change."""
        kinds, names = self._names.get(int(messages.items_W[0]), ((), ()))
        digests = _of_first(messages["digests_D"]).tolist()
        if len(kinds) != len(digests):
            return ()
        updates = bool(columns["optimizer_steps"][0] > 0 and columns["lr"][0] > 0)
        found = self._unchanged.see(
            messages.step, kinds, names, digests, updates=updates, owned=self._owned
        )
        return unchanged_differences(found, len(messages))

    def _named_differences(
        self, names_W: Sequence[Mapping[str, Any]]
    ) -> tuple[StateDifference, ...]:
        """Return gradients that changed otherwise than most, and roles where all have sent them."""
        if not any(names_W):
            return ()
        changed = changed_gradients([names.get("changed", ()) for names in names_W])
        moved = moved_in_passes([names.get("passes", ()) for names in names_W])
        roles_W = [names["roles"] for names in names_W if names.get("roles")]
        if len(roles_W) < len(names_W):
            return (*changed, *moved)
        self._owned = owned_names(roles_W)
        replaced = replaced_differences(self._roles_W, roles_W)
        self._roles_W = roles_W
        return (*changed, *moved, *role_differences(roles_W), *replaced)


def make_combiner(layout: Layout) -> ComparedState:
    """Return the combiner of digests."""
    return ComparedState()


def _trace(messages: Messages) -> TensorTrace | None:
    """Return the first worker's traced tensors, if there are any."""
    if not messages["traced_digests_N"].lengths_R[0]:
        return None
    parts = {
        what: (tuple(map(StateKind, kinds)), tuple(names))
        for what, (kinds, names) in messages.named[0]["traced"].items()
    }
    initial = parts.get("initial")
    count = 0 if initial is None else len(initial[0])
    before = None if initial is None else _tensors(messages, *initial, 0)
    return replace(_tensors(messages, *parts["own"], count), initial=before)


def _tensors(messages: Messages, kinds: _Kinds, names: tuple[str, ...], begin: int) -> TensorTrace:
    rows = slice(begin, begin + len(kinds))
    digests_N, norms_N, sketches = (
        _of_first(messages[name])
        for name in ("traced_digests_N", "traced_norms_N", "traced_sketches")
    )
    sketches_NK = sketches.reshape(-1, TRACE_WIDTH)
    return TensorTrace(kinds, names, digests_N[rows], norms_N[rows], sketches_NK[rows])


def _of_first(arrays: Ragged) -> NDArray[Any]:
    return arrays.flat[: arrays.lengths_R[0]]
