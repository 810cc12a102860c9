"""How each parameter takes part in the training: whether it is trained, updated, reduced, tied.

A worker looks at its parameters when it begins to train, once more some steps later, since some
optimizers are built late, and rarely after that. What differs between workers is a fault; what all
do alike may be one.

Legend of shapes: N parameters.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

import numpy as np

from rankscope.bus.pace import PACE
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.stats.arrays import Ints, digest_of

FIRST_LOOKS = (0, PACE.later_look)
"""Steps of a session in which a worker looks at its parameters."""

LOOK_EVERY = PACE.look_every
"""And it looks in all multiples of this."""

MOST_NAMED = 64
"""Parameters that are told of one look."""

_TIED_FROM = 8  # bits


class Role(IntFlag):
    """What is known of a parameter; above these bits, a digest of what it is tied to."""

    TRAINED = 1
    """It requires a gradient."""
    OWNED = 2
    """It is in a parameter group of the optimizer that is known."""
    TWICE = 4
    """It is in the parameter groups more than once."""
    LEFT_OUT = 8
    """The wrapper was told not to reduce its gradient."""
    ALL_REST = 16
    """No parameter has changed since this one did, though updates were asked for."""


def is_looked_at(step: int, first: int) -> bool:
    """Return whether a worker looks at its parameters in a step of a session.

    Args:
        step: The step.
        first: The session's first step.
    """
    return step - first in FIRST_LOOKS or step % LOOK_EVERY == 0


def role_word(role: Role, tied_to: str = "") -> int:
    """Return the word of a parameter.

    Args:
        role: Its role.
        tied_to: Name of the parameter that is the same tensor and comes before it in the model.
    """
    return int(role) | (digest_of(tied_to.encode()) >> _TIED_FROM << _TIED_FROM if tied_to else 0)


def tie_of(word: int) -> int:
    """Return the digest of what a parameter is tied to; 0 if it is not."""
    return word >> _TIED_FROM


@dataclass(frozen=True, slots=True)
class Roles:
    """One worker's look at its parameters.

    Attributes:
        names: Canonical names of the parameters ``[N]``.
        words: Their roles ``[N]``, see :func:`role_word`.
        left_out: Digests of the parameters that are trained and not reduced, by name and shape.
    """

    names: tuple[str, ...]
    words: tuple[int, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)

    def to_json(self, *, named: bool) -> dict[str, Any]:
        """Return it for a message: most parameters of a model have one role.

        Args:
            named: Whether to tell the names, not their digest alone.
        """
        most = Counter(self.words).most_common(1)[0][0] if self.words else 0
        others: dict[int, list[int]] = {}
        for number, word in enumerate(self.words):
            if word != most:
                others.setdefault(word, []).append(number)
        told: dict[str, Any] = {
            "of": digest_of("\n".join(self.names).encode()),
            "count": len(self.words),
        }
        told |= {"most": most, "others": list(others.items()), "left_out": dict(self.left_out)}
        return told | ({"names": list(self.names)} if named else {})


def role_differences(told_W: Sequence[Mapping[str, Any]]) -> tuple[StateDifference, ...]:
    """Return what is to be told of the roles of all workers' parameters.

    Args:
        told_W: What each worker's :meth:`Roles.to_json` returned; the first one's with names.

    Returns:
        Of the kind ``role``, the parameters whose words differ between workers, and those that all
        have in several places of the optimizer; nothing where the workers' parameters have other
        names. Of the kind ``left-out``, those that are not reduced, and differ. At most
        ``MOST_NAMED`` of each.
    """
    first = told_W[0]
    told: list[StateDifference] = []
    if "names" in first and all(one["of"] == first["of"] for one in told_W):
        words_WN = np.array([_words(one) for one in told_W], np.int64)
        differs_N = (words_WN != words_WN[:1]).any(axis=0)
        twice_N = (words_WN & Role.TWICE).astype(bool).any(axis=0)
        chosen = (differs_N | twice_N).nonzero()[0].tolist()[:MOST_NAMED]
        told += [_difference(StateKind.ROLE, first["names"][n], words_WN[:, n]) for n in chosen]
    names = [name for name in first["left_out"] if all(name in one["left_out"] for one in told_W)]
    for name in names[:MOST_NAMED]:
        digests_W = np.array([one["left_out"][name] for one in told_W], np.int64)
        if (digests_W != digests_W[0]).any():
            told.append(_difference(StateKind.LEFT_OUT, name, digests_W))
    return tuple(told)


def _words(told: Mapping[str, Any]) -> Ints:
    words_N = np.full(int(told["count"]), int(told["most"]), np.int64)
    for word, numbers in told["others"]:
        words_N[list(numbers)] = int(word)
    return words_N


def _difference(kind: StateKind, name: str, digests_W: Ints) -> StateDifference:
    return StateDifference(kind, name, digests_W.copy(), np.zeros(len(digests_W), bool))


class Stillness:
    """Finds parameters that have a gradient and never change, while others do.

    It follows the digests of one worker, turn by turn of the rotation. Of a parameter it says that
    it rests if its bits are those of two turns before or more (four, if the optimizer is known to
    hold it: its learning rate may be 0 on purpose), if its reduced gradient has had other bits in
    between, so that it is not zero, and if a parameter that the optimizer holds has changed since.
    Or if no parameter at all has changed since, in 32 steps in which the optimizer was called with
    a learning rate above 0. So nothing is said in a warm-up from 0, nor of experts that see no
    token. It tells at twice as many turns each time, and once more when it moves again.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Parameter] = {}
        self._moved_since = -1  # the last step in which what has changed since was as before
        self._any_moved_since = -1  # the same of parameters that the optimizer does not hold, too
        self._updates = 0  # steps so far in which the optimizer was to change something

    def see(
        self,
        step: int,
        kinds: Sequence[StateKind],
        names: Sequence[str],
        digests: Sequence[int],
        *,
        updates: bool = False,
    ) -> list[tuple[str, Role, bool]]:
        """Take a step's digests.

        Args:
            step: The step.
            kinds: Of the digests.
            names: What they are of.
            digests: The digests.
            updates: Whether the optimizer was called with a learning rate above 0.

        Returns:
            For each parameter that is to be told: its name, its role, and whether it rests.
        """
        self._updates += updates
        turn: dict[str, dict[StateKind, int]] = {}
        for kind, name, digest in zip(kinds, names, digests, strict=True):
            turn.setdefault(name, {})[kind] = digest
        told = []
        trained = [(n, of) for n, of in turn.items() if {_PARAMETER, _REDUCED} <= of.keys()]
        for name, of in trained:
            known = self._known.get(name)
            if known is None or known.digest != of[_PARAMETER]:
                if known is not None:
                    self._any_moved_since = max(self._any_moved_since, known.last)
                    if StateKind.OPTIMIZER in of:
                        self._moved_since = max(self._moved_since, known.last)
                    if known.told:
                        told.append((name, _role(of), False))
                known = self._known[name] = _Parameter(of[_PARAMETER], step, self._updates)
            else:
                known.turns += 1
            known.last = step
            if of[_REDUCED] and len(known.gradients) < _DIFFERENT:
                known.gradients.add(of[_REDUCED])
        for name, of in trained:
            known = self._known[name]
            if self._rests(known, owned=StateKind.OPTIMIZER in of):
                known.told = known.turns
                others_rest = self._any_moved_since < known.first
                told.append((name, _role(of) | (Role.ALL_REST if others_rest else Role(0)), True))
        return told[:MOST_NAMED]

    def _rests(self, known: "_Parameter", *, owned: bool) -> bool:
        due = max(_TURNS * (1 + owned), 2 * known.told)
        has_gradient = len(known.gradients) == _DIFFERENT
        if known.turns < due or not has_gradient:
            return False
        asked_for = self._updates - known.updates >= _UPDATES
        return self._moved_since >= known.first or (
            asked_for and self._any_moved_since < known.first
        )


_PARAMETER, _REDUCED = StateKind.PARAMETER, StateKind.REDUCED
_TURNS = 2
_DIFFERENT = 2  # gradients
_UPDATES = 32  # steps: rounding may lose a few updates of a small rate


def _role(of: Mapping[StateKind, int]) -> Role:
    return Role.TRAINED | (Role.OWNED if StateKind.OPTIMIZER in of else Role(0))


@dataclass(slots=True)
class _Parameter:
    digest: int
    first: int  # step with this digest
    updates: int  # before that step
    last: int = -1
    turns: int = 0  # with the digest of the turn before
    told: int = 0
    gradients: set[int] = field(default_factory=set)


def resting(
    found: Iterable[tuple[str, Role, bool]], num_workers: int
) -> tuple[StateDifference, ...]:
    """Return what :meth:`Stillness.see` has found, for the record; what holds of all workers."""
    return tuple(
        StateDifference(
            StateKind.RESTING, name, np.full(num_workers, int(role)), np.full(num_workers, rests)
        )
        for name, role, rests in found
    )


def changed_gradients(names_W: Sequence[Sequence[str]]) -> tuple[StateDifference, ...]:
    """Return the gradients that were scaled otherwise than most before they were applied.

    Args:
        names_W: Names of the parameters, by worker.
    """
    names = list(dict.fromkeys(name for names in names_W for name in names))[:MOST_NAMED]
    digests_W = np.zeros(len(names_W), np.int64)
    return tuple(StateDifference(StateKind.CHANGED, n, digests_W, digests_W != 0) for n in names)
