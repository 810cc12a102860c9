"""State that should be equal on several workers, compared by digests, and values as words.

Under DDP every worker holds all parameters, buffers and optimizer state; with HSDP, the workers of
equal shards do. Their bits stay equal for as long as all apply the same gradients. So a single
difference is exact evidence, and its place in the model shows where to look.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.words import listed, name_ranks
from rankscope.stats.arrays import Bools, Floats, Floats32, Ints, digest_of
from rankscope.stats.state import Stateful

if TYPE_CHECKING:
    from array import array

_T = TypeVar("_T")

RUNNING_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""torch's names of the buffers of a normalisation over batches."""


class StateKind(StrEnum):
    """A kind of compared state."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    """All state that the optimizer keeps for a parameter."""
    REDUCED = "reduced"
    """The gradient right after the reduction."""
    APPLIED = "applied"
    """The gradient when ``optimizer.step`` was called."""
    STATISTICS = "statistics"
    """Running statistics after a step, until DDP broadcasts rank 0's before the next one."""
    BROADCAST = "broadcast"
    """The same right after it has."""
    ROLE = "role"
    """How a parameter takes part in the training: its role."""
    LEFT_OUT = "left-out"
    """A parameter that is trained, and whose gradient is not reduced."""
    CHANGED = "changed"
    """A gradient whose scaling between reduction and optimizer differs from that of most."""
    RESTING = "resting"
    """A parameter that has a gradient and does not change, while others do."""
    PASSES = "passes"
    """State that changes between the forward passes of a step; its digest counts the changes."""
    RECOMPUTED = "recomputed"
    """Running statistics that a backward pass moves; 1 on workers where it does."""
    COUNTS = "counts"
    """A buffer of 16 bits that counts tokens; the largest value."""
    ADAPTED = "adapted"
    """A matrix that an adapter is added to, and that is trained; 1 on workers where it is."""
    SHARDS = "shards"
    """A sharded matrix whose shards begin with the same numbers."""
    MODE = "mode"
    """Modules in training mode on some workers and in evaluation mode on others; in words."""
    PRECISION = "precision"
    """A setting of the forward pass's precision that differs between workers; in words."""
    OPTION = "option"
    """A setting of the optimizer that differs between workers; in words."""
    MODULE = "module"
    """Mode, class, code or an attribute of a module, where a canary differs; ``name`` in words."""
    OPERATION = "operation"
    """An operation of a canary's forward pass, or a constant or random numbers in it; in words."""
    SETTING = "setting"
    """A flag, a version or a device, where a canary differs; in words."""
    HELD = "held"
    """A parameter or buffer in a canary's forward pass."""
    HOOK = "hook"
    """Hooks of a module, where a canary differs; in words."""
    STARTED = "started"
    """What each worker holds when a session begins, see ``rankscope.bus.messages.HeldValues``."""
    SAVED = "saved"
    """The same when the training saves its optimizer, and when the session ends."""
    JOINED = "joined"
    """A parameter that is trained, and was not when the session began; how many are, so far."""
    OUTSIDE = "outside"
    """Parameters of a model that is trained and not watched."""
    ROUNDED = "rounded"
    """Updates of parameters of low precision against what rounding loses."""
    MISSED = "missed"
    """Calls in a row in which the optimizer finds no gradient."""
    REPLACED = "replaced"
    """Weights that were others than the optimizer's copies of them before the first update."""
    STALE = "stale"
    """Whether a forward pass has copies of weights that autocast made before an update."""
    CONSTANT = "constant"
    """An input of the model that stays the same from step to step."""
    EXCHANGED = "exchanged"
    """An operation by which the model's forward pass exchanges tensors among workers; its calls."""
    FOLLOWS = "follows"
    """How a copy of the model beside it follows it."""


@dataclass(frozen=True, slots=True)
class StateDigests:
    """One worker's digests of the state compared in one step. D items."""

    kinds: tuple[StateKind, ...] = ()  # kind of each item
    names: tuple[str, ...] = ()  # its name in the model
    # digest of its bits, int64 ``[D]``
    digests_D: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    # for reduced gradients: whether the reduction left the bits of the local gradient as they were
    unchanged_D: Bools = field(default_factory=lambda: np.empty(0, bool))

    @property
    def items(self) -> int:
        """A 63-bit digest of kinds and names, equal on workers whose items are the same."""
        return _digest_of_items(self.kinds, self.names)


@dataclass(frozen=True, slots=True)
class StateDifference:
    """State that differs between workers that should hold the same."""

    kind: StateKind
    name: str  # its name in the model
    digests_W: Ints  # digest of its bits on every worker, int64 ``[W]``
    # for a reduced gradient: whether the reduction left the local gradient's bits as they were,
    # bool ``[W]``. For a parameter: whether it is frozen
    unchanged_W: Bools

    @property
    def frozen(self) -> bool:
        """Whether it is a parameter that no worker trains."""
        return self.kind is StateKind.PARAMETER and bool(self.unchanged_W.all())

    @property
    def follows_places(self) -> bool:
        """Whether what ranks hold depends on their place in groups of one size."""
        return follow_places(self.digests_W.tolist())

    def minority_ranks(self, replicas_W: Ints) -> tuple[int, ...]:
        """Return the workers that differ from most of those that should hold the same.

        Workers with equal numbers in ``replicas_W`` should. Where no majority agrees, all workers
        concerned are returned.
        """
        values = self.digests_W.tolist()
        if self.kind is StateKind.OPTIMIZER:
            values = [value or None for value in values]
        buffer = self.kind is StateKind.BUFFER
        odd = [
            ranks[index]
            for ranks in ([range(len(values))] if buffer else _replicas(replicas_W))
            for index in minority_ranks([values[rank] for rank in ranks])
        ]
        return tuple(sorted(odd))


def trained_by_place(differences: Iterable[StateDifference]) -> tuple[str, ...]:
    """Return the trained parameters that follow a rank's place in its group, as experts do."""
    found = tuple(differences)
    own = (StateKind.REDUCED, StateKind.APPLIED)
    placed = {d.name for d in found if d.kind in own and d.follows_places}
    return tuple(
        d.name
        for d in found
        if d.kind is StateKind.PARAMETER and not d.frozen and d.name in placed and d.follows_places
    )


class ParametersByPlace(Stateful):
    """The parameters that ranks of a loop hold by their place in groups, as experts.

    None where these are all that the model trains, ``trained`` in number (0 if unknown): then the
    training reduces over wrong groups.
    """

    SETTINGS = ("_trained",)

    def __init__(self, trained: int) -> None:
        self._trained = trained
        self._names: dict[str, bool] = {}

    @property
    def names(self) -> Collection[str]:
        """Their names."""
        return () if 0 < self._trained <= len(self._names) else self._names

    def observe(self, differences: Iterable[StateDifference]) -> tuple[str, ...]:
        """Add those that a step shows, and return them."""
        now = trained_by_place(differences)
        self._names |= dict.fromkeys(now, True)
        return now if self.names else ()


def follow_places(values: Sequence[Hashable]) -> bool:
    """Return whether values follow the place in groups of one size, two groups at least.

    So do those of the ranks 0 and 2, and 1 and 3, where each group of two neighbours has both.

    Example:
        >>> follow_places([5, 6, 5, 6]), follow_places([5, 6, 6, 5]), follow_places([5, 6])
        (True, False, False)
    """
    size = len(set(values))
    groups, rest = divmod(len(values), size)
    return size > 1 and groups > 1 and not rest and [*values] == [*values[:size]] * groups


def minority_ranks(values: Sequence[Hashable | None]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of the majority; all known ones without a majority.

    ``values`` has one per rank; None is unknown, which is no difference.

    Example:
        >>> minority_ranks([7, 7, 9, None]), minority_ranks([7, 7, 9, 9]), minority_ranks([7, 7])
        ((2,), (0, 1, 2, 3), ())
    """
    known = [rank for rank, value in enumerate(values) if value is not None]
    counts = Counter(values[rank] for rank in known)
    if len(counts) < 2:
        return ()
    common = majority(counts)
    return tuple(rank for rank in known if common is None or values[rank] != common)


def majority(counts: "Counter[_T]") -> _T | None:
    """Return the value that more than half of all have, None without one."""
    if not counts:
        return None
    value, most = counts.most_common(1)[0]
    return value if 2 * most > counts.total() else None


def digest_of_digests(digests_D: "Ints | NDArray[np.uint64] | array[int]") -> int:
    """Return one 63-bit digest of several digests of 64 bits, in order."""
    return digest_of(digests_D.tobytes())


_GRADIENTS = (StateKind.REDUCED, StateKind.APPLIED)


def differences(
    own: StateDigests, digests_WD: Ints, unchanged_WD: Bools, replicas_W: Ints
) -> tuple[StateDifference, ...]:
    """Return the differences between workers that should hold the same, in order of the items.

    Workers may update shares of the parameters, of which each has one owner. So an optimizer that
    holds nothing for a parameter (digest 0) differs from none. Nor does a gradient that one worker
    alone has, nor the state of that parameter in the others' optimizers.

    All workers have the items of ``own``. Those with equal numbers in ``replicas_W`` should hold
    the same parameters, optimizer state and gradients; buffers are compared between all.
    """
    among_all_D = (digests_WD != digests_WD[:1]).any(axis=0)
    if not among_all_D.any():
        return ()
    items = list(zip(own.kinds, own.names, strict=True))
    kept_D = np.array([kind is StateKind.OPTIMIZER for kind in own.kinds])
    gradient_D = np.array([kind in _GRADIENTS for kind in own.kinds])
    among_replicas_D = np.zeros_like(among_all_D)
    for ranks in _replicas(replicas_W):
        held_RD = digests_WD[ranks]
        owner_D = (held_RD != 0).argmax(axis=0)  # the first that holds something
        held_RD = np.where(kept_D & (held_RD == 0), held_RD[owner_D, range(len(kept_D))], held_RD)
        of_one_D = gradient_D & ((held_RD != 0).sum(axis=0) == 1)
        if of_one_D.any():
            of_one = {own.names[at] for at in np.flatnonzero(of_one_D).tolist()}
            of_one_D |= kept_D & np.array([name in of_one for name in own.names])
        among_replicas_D |= (held_RD != held_RD[0]).any(axis=0) & ~of_one_D
    trained = {name for kind, name in items if kind is StateKind.REDUCED}
    frozen_D = [kind is StateKind.PARAMETER and name not in trained for kind, name in items]
    unchanged_WD = unchanged_WD | np.array(frozen_D, bool)
    return tuple(
        StateDifference(kind, name, digests_WD[:, d].copy(), unchanged_WD[:, d].copy())
        for kind in StateKind
        for d, (item, name) in enumerate(items)
        if item is kind and (among_all_D if kind is StateKind.BUFFER else among_replicas_D)[d]
    )


@functools.lru_cache(maxsize=256)
def _digest_of_items(kinds: tuple[StateKind, ...], names: tuple[str, ...]) -> int:
    text = "\n".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
    return digest_of(text.encode())


def _replicas(replicas_W: Ints) -> list[list[int]]:
    """Return groups of two or more ranks with equal numbers, in order of these."""
    ranks = ranks_by(replicas_W.tolist())
    return [ranks[replica] for replica in sorted(ranks) if len(ranks[replica]) > 1]


TRACE_WIDTH = 61
"""Numbers in the sketch of a tensor: the distance of two of them is known to about 9 %."""


@dataclass(frozen=True, slots=True)
class TensorTrace:
    """Tensors of one worker in one step. N tensors, k numbers a sketch."""

    # kind of each ``[N]``: a parameter after the step, a reduced gradient, …
    kinds: tuple[StateKind, ...]
    names: tuple[str, ...]  # its canonical name in the model ``[N]``
    digests_N: Ints  # digest of its bits
    norms_N: Floats  # its L2 norm
    # its linear sketch: that of a difference is the difference of sketches
    sketches_NK: Floats32
    # the model's content before this step, in the first one that is traced
    initial: "TensorTrace | None" = None


_Value = TypeVar("_Value", bound=Hashable)

_MOST_GROUPS = 4


def known_values(values_W: NDArray[Any], known_W: Bools) -> list[Any]:
    """Return values of the workers as a list, None where one is unknown."""
    return [v if known else None for v, known in zip(values_W.tolist(), known_W, strict=True)]


def ranks_by(values: Iterable[_Value | None]) -> dict[_Value, list[int]]:
    """Return the ranks that have each value, given one per rank; None where it is unknown."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return ranks


def name_values(values: Sequence[_Value | None], word: Callable[[_Value], str] = str) -> str:
    """Return values and their ranks: ``0.3 on rank 3, 0.1 on the others``."""
    ranks = ranks_by(values)
    common = majority(Counter({value: len(own) for value, own in ranks.items()}))
    rest = [value for value in ranks if value != common] or list(ranks)
    parts = [f"{word(value)} on {name_ranks(ranks[value])}" for value in rest[:_MOST_GROUPS]]
    if len(rest) > _MOST_GROUPS:
        others = sum(len(ranks[value]) for value in rest[_MOST_GROUPS:])
        parts.append(f"other values on {others} more")
    if common is not None and common not in rest:
        parts.append(f"{word(common)} on the others")
    return ", ".join(parts)


def copied_values(now_W: Ints, saved_W: Ints, ranks: Iterable[int]) -> str:
    """Return whose saved values some ranks hold, in words; empty unless each holds another's.

    Values that several ranks had saved alike prove nothing.

    Example:
        >>> copied_values(np.array([5, 5, 5]), np.array([5, 6, 7]), [1, 2])
        "ranks 1 and 2 hold rank 0's"
    """
    owners = {value: rank for rank, value in enumerate(saved_W.tolist())}
    if len(owners) < len(saved_W):
        return ""
    sources: dict[int, list[int]] = {}
    for rank in ranks:
        owner = owners.get(int(now_W[rank]))
        if owner is None:
            return ""
        sources.setdefault(owner, []).append(rank)
    parts = [
        f"{name_ranks(own)} hold{'s' if len(own) == 1 else ''} {name_ranks([owner])}'s"
        for owner, own in sources.items()
    ]
    return listed(parts)
