"""How each parameter takes part in the training: whether it is trained, updated, reduced, tied.

A worker reads the roles when it begins to train, once more some steps later, since some optimizers
are built late, and rarely after that. A difference between workers is a fault; equal roles may hold
one, too.

Legend of shapes: N parameters.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

import numpy as np

from rankscope.bus.pace import PACE
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.stats.arrays import Bools, Ints, digest_of

FIRST_ROLE_STEPS = (0, PACE.later_look)
"""Steps of a session, counted from its first, in which a worker reads the roles."""

ROLES_EVERY = PACE.look_every
"""It also reads them in all multiples of this."""

MOST_NAMED = 64
"""Parameters in one record, at most."""

_TIED_FROM = 8  # bits
_CUT = re.compile(r"\[\d+:\d+\]$| … .*$")  # of an item's name: a range, or the last of several


class Role(IntFlag):
    """The role of a parameter; the bits above hold a digest of the parameter that it is tied to."""

    TRAINED = 1
    """It requires a gradient."""
    OWNED = 2
    """It is in a parameter group of the known optimizer."""
    TWICE = 4
    """It is in the parameter groups more than once."""
    LEFT_OUT = 8
    """The wrapper does not reduce its gradient, by request."""
    ALL_REST = 16
    """No parameter has changed since this one did, though the optimizer was called."""
    REPLACED = 32
    """In its place, the optimizer holds another tensor that never has a gradient."""


_OF_OWNERS = int(Role.OWNED | Role.TWICE)


def is_role_step(step: int, first: int) -> bool:
    """Return whether a worker reads its parameters' roles in a step; ``first`` is the session's."""
    return step - first in FIRST_ROLE_STEPS or step % ROLES_EVERY == 0


def role_word(role: Role, tied_to: str = "") -> int:
    """Return the word of a parameter; ``tied_to`` names the same tensor earlier in the model."""
    return int(role) | (digest_of(tied_to.encode()) >> _TIED_FROM << _TIED_FROM if tied_to else 0)


def tie_of(word: int) -> int:
    """Return the digest of the parameter that this one is tied to; 0 without."""
    return word >> _TIED_FROM


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of one worker's parameters."""

    names: tuple[str, ...]  # canonical names of the parameters ``[N]``
    words: tuple[int, ...]  # their roles ``[N]``, see `role_word`
    left_out: Mapping[str, int] = field(default_factory=dict)  # digests, by name and shape
    replaced: Mapping[str, int] = field(default_factory=dict)  # digests, by name

    def to_json(self, *, named: bool) -> dict[str, Any]:
        """Return it for a message: most parameters of a model have one role."""
        most = Counter(self.words).most_common(1)[0][0] if self.words else 0
        others: dict[int, list[int]] = {}
        for number, word in enumerate(self.words):
            if word != most:
                others.setdefault(word, []).append(number)
        content: dict[str, Any] = {
            "of": digest_of("\n".join(self.names).encode()),
            "count": len(self.words),
        }
        content |= {"most": most, "others": list(others.items()), "left_out": dict(self.left_out)}
        content["replaced"] = dict(self.replaced)
        return content | ({"names": list(self.names)} if named else {})


def role_differences(roles_W: Sequence[Mapping[str, Any]]) -> tuple[StateDifference, ...]:
    """Return the differences of roles between workers, and roles that are faults on all of them.

    ``roles_W`` are :meth:`Roles.to_json`, the first one with names. Of the kind ``role`` are
    parameters whose words differ, and those that all have in several places of the optimizer, if
    all workers' parameters have one set of names; of the kind ``left-out``, parameters that are not
    reduced and differ.
    """
    first = roles_W[0]
    found: list[StateDifference] = []
    if "names" in first and all(one["of"] == first["of"] for one in roles_W):
        words_WN = np.array([_words(one) for one in roles_W], np.int64)
        compared_WN = words_WN & ~_OF_OWNERS if in_shares(words_WN) else words_WN
        differs_N = (compared_WN != compared_WN[:1]).any(axis=0)
        twice_N = (words_WN & Role.TWICE).astype(bool).any(axis=0)
        chosen = (differs_N | twice_N).nonzero()[0].tolist()
        found += [_difference(StateKind.ROLE, first["names"][n], words_WN[:, n]) for n in chosen]
    names = [name for name in first["left_out"] if all(name in one["left_out"] for one in roles_W)]
    for name in names:
        digests_W = np.array([one["left_out"][name] for one in roles_W], np.int64)
        if (digests_W != digests_W[0]).any():
            found.append(_difference(StateKind.LEFT_OUT, name, digests_W))
    return tuple(found)


def in_shares(words_WN: Ints) -> bool:
    """Return whether workers update shares of the parameters, as ZeRO does.

    Each parameter that not all of them own has one owner, and there are several owners. Whether the
    parameters agree after the update is seen by their digests.
    """
    owned_WN = (words_WN & Role.OWNED).astype(bool)
    shared_WN = owned_WN[:, ~owned_WN.all(axis=0) & (words_WN & Role.TRAINED).any(axis=0)]
    alone = bool((shared_WN.sum(axis=0) == 1).all())
    return alone and int(np.count_nonzero(shared_WN.any(axis=1))) > 1


def owned_names(roles_W: Sequence[Mapping[str, Any]]) -> frozenset[str] | None:
    """Return the parameters that some worker's optimizer holds; None while names are unknown."""
    first = roles_W[0]
    if "names" not in first:
        return None
    words_WN = np.array([_words(one) for one in roles_W if one["of"] == first["of"]])
    held = np.flatnonzero((words_WN & Role.OWNED).any(axis=0)).tolist()
    return frozenset(first["names"][number] for number in held)


def replaced_differences(
    before_W: Sequence[Mapping[str, Any]], roles_W: Sequence[Mapping[str, Any]]
) -> tuple[StateDifference, ...]:
    """Return the parameters that keep their bits while an optimizer holds others in their place."""
    both_W = list(zip(before_W, roles_W, strict=bool(before_W)))
    names = roles_W[0]["replaced"] if before_W else ()
    found = [
        (name, Role.TRAINED | Role.REPLACED, True)
        for name in names
        if all(name in a["replaced"] and a["replaced"][name] == b["replaced"].get(name)
               for a, b in both_W)
    ]  # fmt: skip
    return unchanged_differences(found, len(roles_W))


def _words(roles: Mapping[str, Any]) -> Ints:
    words_N = np.full(int(roles["count"]), int(roles["most"]), np.int64)
    for word, numbers in roles["others"]:
        words_N[list(numbers)] = int(word)
    return words_N


def _difference(kind: StateKind, name: str, digests_W: Ints) -> StateDifference:
    return StateDifference(kind, name, digests_W.copy(), np.zeros(len(digests_W), bool))


class UnchangedParameters:
    """Finds parameters that have a gradient and never change, while others do.

    It follows the digests of one worker, slot by slot. A parameter counts as unchanged if

    - its bits are those of its last two digests or more (four if the optimizer holds it, since its
      learning rate may be 0 on purpose),
    - its reduced gradient has changed in between, so that it is not zero,
    - and a parameter that the optimizer holds has changed since; or none at all has changed, in 32
      steps in which the optimizer was called with a learning rate above 0.

    So neither a warm-up from 0 nor an expert without tokens counts. A parameter is returned each
    time that the number of equal digests has doubled, and once more when it changes again.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, _Parameter] = {}
        self._moved_since = -1  # last unchanged step of a held parameter that has changed since
        self._any_moved_since = -1  # the same of any parameter
        self._updates = 0  # steps with a learning rate above 0

    def see(
        self,
        step: int,
        kinds: Sequence[StateKind],
        names: Sequence[str],
        digests: Sequence[int],
        *,
        updates: bool = False,  # the optimizer was called with a learning rate above 0
        owned: Container[str] | None = None,
    ) -> list[tuple[str, Role, bool]]:
        """Process a step's digests; return name, role, and whether it is unchanged, to record."""
        self._updates += updates
        by_name: dict[str, dict[StateKind, int]] = {}
        for kind, name, digest in zip(kinds, names, digests, strict=True):
            by_name.setdefault(name, {})[kind] = digest
        found = []
        trained = [(n, of) for n, of in by_name.items() if {_PARAMETER, _REDUCED} <= of.keys()]
        held = {
            name: StateKind.OPTIMIZER in of if owned is None else _CUT.sub("", name) in owned
            for name, of in trained
        }
        for name, of in trained:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.digest != of[_PARAMETER]:
                if parameter is not None:
                    self._any_moved_since = max(self._any_moved_since, parameter.last)
                    if held[name]:
                        self._moved_since = max(self._moved_since, parameter.last)
                    if parameter.reported:
                        found.append((name, _role(held[name]), False))
                parameter = _Parameter(of[_PARAMETER], step, self._updates)
                self._parameters[name] = parameter
            else:
                parameter.repeats += 1
            parameter.last = step
            if of[_REDUCED] and len(parameter.gradients) < _DIFFERENT:
                parameter.gradients.add(of[_REDUCED])
        for name in held:
            parameter = self._parameters[name]
            if self._is_unchanged(parameter, owned=held[name]):
                parameter.reported = parameter.repeats
                others_too = self._any_moved_since < parameter.first
                rest = Role.ALL_REST if others_too else Role(0)
                found.append((name, _role(held[name]) | rest, True))
        return found

    def _is_unchanged(self, parameter: "_Parameter", *, owned: bool) -> bool:
        due = max(_REPEATS * (1 + owned), 2 * parameter.reported)
        has_gradient = len(parameter.gradients) == _DIFFERENT
        if parameter.repeats < due or not has_gradient:
            return False
        updated = self._updates - parameter.updates >= _UPDATES
        return self._moved_since >= parameter.first or (
            updated and self._any_moved_since < parameter.first
        )


_PARAMETER = StateKind.PARAMETER
_REDUCED = StateKind.REDUCED
_REPEATS = 2
_DIFFERENT = 2  # gradients
_UPDATES = 32  # steps: rounding may lose a few updates of a small rate


def _role(held: bool) -> Role:
    return Role.TRAINED | (Role.OWNED if held else Role(0))


@dataclass(slots=True)
class _Parameter:
    digest: int
    first: int  # step with this digest
    updates: int  # before that step
    last: int = -1
    repeats: int = 0  # of this digest
    reported: int = 0  # number of repeats at the last report
    gradients: set[int] = field(default_factory=set)


_FEWEST_MATRICES = 2

ShardStart = tuple[str, str, int]
"""A matrix, the place of a rank's shard in it, and a digest of the shard's first elements."""


def unchanged_differences(
    found: Iterable[tuple[str, Role, bool]], num_workers: int
) -> tuple[StateDifference, ...]:
    """Return the result of :meth:`UnchangedParameters.see` for the record, alike on all workers."""
    return tuple(
        StateDifference(
            StateKind.RESTING, name, np.full(num_workers, int(role)), np.full(num_workers, rests)
        )
        for name, role, rests in found
    )


def named_by(kind: StateKind, names_W: Sequence[Sequence[str]]) -> tuple[StateDifference, ...]:
    """Return what workers name, for the record: 1 on those that do."""
    none_W = np.zeros(len(names_W), bool)
    return tuple(
        StateDifference(kind, name, np.array([name in own for own in names_W], np.int64), none_W)
        for name in dict.fromkeys(name for own in names_W for name in own)
    )


def alike_shards(starts_W: Sequence[Sequence[ShardStart]]) -> tuple[StateDifference, ...]:
    """Return the matrices whose shards begin alike, for the record; none where some do not."""
    held: dict[str, list[tuple[str, int]]] = {}
    for starts in starts_W:
        for name, place, digest in starts:
            held.setdefault(name, []).append((place, digest))
    known = {
        name: [set(column) for column in zip(*found, strict=True)]
        for name, found in held.items()
        if len(found) == len(starts_W)
    }
    divided = {name: digests for name, (places, digests) in known.items() if len(places) > 1}
    if len(divided) < _FEWEST_MATRICES or any(len(each) > 1 for each in divided.values()):
        return ()
    return named_by(StateKind.SHARDS, [list(divided)] * len(starts_W))


def numbered(
    kind: StateKind, sent_W: Sequence[Sequence[tuple[str, int, bool]]]
) -> tuple[StateDifference, ...]:
    """Return the numbers and flags that workers send by name, for the record; else 0 and False."""
    numbers: dict[str, Ints] = {}
    flags: dict[str, Bools] = {}
    for rank, sent in enumerate(sent_W):
        for name, number, flag in sent:
            numbers.setdefault(name, np.zeros(len(sent_W), np.int64))[rank] = number
            flags.setdefault(name, np.zeros(len(sent_W), bool))[rank] = flag
    return tuple(StateDifference(kind, name, numbers[name], flags[name]) for name in numbers)
