"""Does the optimizer's update agree with the one that was computed again on whole parameters?

For each parameter, u is the update that was computed again, v the one that happened. They agree if

    |v - u| <= 4 |d| + 2^-23 |p| + 2 ulp(max |p|),

where d is the effect on u of moving a quarter of the elements of gradient and state by one unit in
the last place of the coarsest type in which the optimizer computes: so a matrix optimizer that runs
in bfloat16 gets its own bound, and so does one that rounds at random. The other terms are one
rounding of each element in float32, and two elements that a coarser type rounds the other way.

A parameter that ranks share is judged by the sums over this run's workers, one that each of them
holds by each of them.

Legend of shapes: W workers, P parameters.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from rankscope.bus.shares import Packable
from rankscope.stats.arrays import Floats
from rankscope.stats.rounding import UNIT_ROUNDOFF

MOST = 8
"""Parameters of one optimizer whose update is computed again, in a large model."""

MOST_OF_SMALL = 64
"""The same in a small model."""

FIELDS = (
    *("elements", "expected", "actual", "product", "distance", "spread", "weights", "largest"),
    *("along_weights", "turned_weights", "resting", "driven", "rows", "still_rows"),
    *("moved", "copied", "later"),
)
"""Numbers of one parameter's part on one worker, see :class:`PartOfUpdate`."""


@dataclass(frozen=True, slots=True)
class PartOfUpdate(Packable):
    """What is known of one parameter's update on one worker."""

    name: str
    optimizer: str  # the name of the optimizer's class
    dtype: str
    shared: bool  # whether ranks hold parts of it
    learning_rate: float  # of its group; NaN if unknown
    decay: float  # the weight decay of its group; NaN if unknown
    # the type of the model's own copy; empty where the optimizer holds the model's parameter itself
    copied_to: str
    random: bool  # whether the optimizer draws random numbers
    # axes of the mesh along which each rank's part was updated by itself, as a trial
    alone: tuple[str, ...]
    # sums over the elements, in the order of :data:`FIELDS`. ``expected`` and ``actual`` are
    # squared norms of the update, ``product`` their inner product, ``distance`` that of their
    # difference, ``spread`` that of the effect of rounding, ``weights`` that of the parameter,
    # ``largest`` its largest magnitude; ``along_weights`` and ``turned_weights`` are the products
    # of it with the difference and with the expected update. ``resting`` of ``driven`` elements
    # other than 0 with a gradient do not move; ``still_rows`` of ``rows`` rows are not moved, and
    # should be. ``moved`` is the squared change of the parameter between the forward pass and the
    # update, ``later`` that between the update and the end of the step, ``copied`` the squared
    # distance of the model's own copy there.
    numbers: Floats
    # for each of ``alone``, the squared distance of the update from that trial
    trials: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateShare(Packable):
    """One worker's share of an audited update."""

    parts: tuple[PartOfUpdate, ...] = ()  # parts of the parameters, in order
    num_parameters: int = 0  # how many parameters the optimizers train
    # what runs after the optimizer's own step, and may change its result
    hooks: tuple[str, ...] = ()
    # why the update of some optimizer was not checked, by its class
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether each part has all numbers."""
        return all(part.numbers.shape == (len(FIELDS),) for part in self.parts)


_BLUR = 0.5
"""Of an update's norm: where rounding may change so much, agreement proves nothing."""

_VISIBLE = 0.01
"""Of an update's norm: a smaller change of the weights before it is rounding."""

_NEAR = 0.05
"""Of a difference: what explains all but so much of it describes it."""

_RESTING = 0.5
"""Of the elements with a gradient: where so many stay as they are, the result has their share."""


class UpdateMismatch(StrEnum):
    """How a parameter's update differs."""

    ALONE = "alone"
    """Each rank updates its own part as if that were the whole parameter."""
    NONE = "none"
    """There is none."""
    ROWS = "rows"
    """Some rows have none."""
    SCALE = "scale"
    """It is a multiple."""
    DECAY = "decay"
    """A multiple of the weights themselves is added."""
    CHANGED = "changed"
    """It differs in another way."""
    MOVED = "moved"
    """The weights changed between the forward pass and the update."""
    NOT_COPIED = "not_copied"
    """The model's own copy of the weights does not follow."""


@dataclass(frozen=True, slots=True)
class OddUpdate:
    """A parameter whose update differs."""

    name: str
    how: UpdateMismatch
    optimizer: str
    ranks: tuple[int, ...]  # the workers concerned; empty for all
    cosine: float
    ratio: float  # norm of the update over that of the one computed again
    error: float  # norm of the difference, over that of the update computed again
    bound: float  # what rounding explains of that
    # of a multiple; of a decay, over that of the settings, NaN without one; of rows, their share
    factor: float = math.nan
    axis: str = ""  # axes of the mesh whose parts are updated alone


@dataclass(frozen=True, slots=True)
class UpdateVerdict:
    """The result of an audited update."""

    compared: tuple[str, ...]  # names of the parameters that were compared, beyond rounding
    unseen: tuple[str, ...]  # names of those whose update rounding may hide
    # names, and shares of elements with a gradient that are not moved
    resting: tuple[tuple[str, float], ...]
    # names of those that change after the update, and by how many times the update
    later: tuple[tuple[str, float], ...]
    odd: tuple[OddUpdate, ...]
    error: float  # the largest relative difference of those that agree
    parameter: str
    optimizers: tuple[str, ...]


class _Update:
    """The numbers of one parameter, on one worker or summed over all of them."""

    def __init__(self, parts: Sequence[PartOfUpdate], ranks: tuple[int, ...]) -> None:
        first = parts[0]
        self.part = first
        self.ranks = ranks
        stacked: Floats = np.stack([one.numbers for one in parts])
        self._sums = dict(zip(FIELDS, stacked.sum(axis=0).tolist(), strict=True))
        self._largest = float(stacked[:, FIELDS.index("largest")].max())
        self._trials = [sum(each) for each in zip(*(one.trials for one in parts), strict=True)]
        roundoff = 2 * UNIT_ROUNDOFF.get(first.dtype, UNIT_ROUNDOFF["float32"])
        self.bound = (
            4 * self.norm("spread")
            + 2 * UNIT_ROUNDOFF["float32"] * self.norm("weights")
            + 2 * roundoff * self._largest
        )

    def __getitem__(self, name: str) -> float:
        return float(self._sums[name])

    def norm(self, name: str) -> float:
        """Return the root of a sum of squares."""
        return math.sqrt(max(self[name], 0.0))

    @property
    def finite(self) -> bool:
        """Whether all numbers are."""
        return all(map(math.isfinite, self._sums.values()))

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.norm("distance") <= self.bound

    @property
    def relative(self) -> tuple[float, float]:
        """The difference and its bound, over the norm of the update that was computed again."""
        size = self.norm("expected")
        return (self.norm("distance") / size, self.bound / size) if size else (0.0, 0.0)

    @property
    def seen(self) -> bool:
        """Whether the update is clear of rounding, or the same in each bit."""
        size = self.norm("expected")
        return self.bound < _BLUR * size or (size > 0 and not self["distance"])

    def changes(self, name: str) -> bool:
        """Return whether a change of the weights before or after the update exceeds rounding."""
        size = self.norm("expected")
        return size > 0 and self.norm(name) > self.bound + _VISIBLE * size

    @property
    def follows(self) -> bool:
        """Whether the model's own copy, if any, has the weights after the update."""
        if not self.part.copied_to:
            return True
        ulp = 2 * UNIT_ROUNDOFF.get(self.part.copied_to, UNIT_ROUNDOFF["float32"])
        return self.norm("copied") <= ulp * self.norm("weights")

    def odd(self) -> Iterator[OddUpdate]:
        """Yield how the update differs, if it does."""
        if not self.agrees:
            how, factor, axis = self._how()
            yield self._describe(how, factor, axis)
        if self.changes("moved"):
            yield self._describe(UpdateMismatch.MOVED, self.norm("moved") / self.norm("expected"))
        if not self.follows:
            yield self._describe(UpdateMismatch.NOT_COPIED)

    def _how(self) -> tuple[UpdateMismatch, float, str]:
        """Return how the update differs, a factor, and an axis."""
        near = max(self.bound, _NEAR * self.norm("distance"))
        for axis, distance in zip(self.part.alone, self._trials, strict=True):
            if math.sqrt(distance) <= near:
                return UpdateMismatch.ALONE, math.nan, axis
        if not self["actual"]:
            return UpdateMismatch.NONE, 0.0, ""
        if self["expected"]:
            factor = self["product"] / self["expected"]
            rest = self["actual"] - factor * self["product"]
            if math.sqrt(max(rest, 0.0)) <= near:
                return UpdateMismatch.SCALE, factor, ""
        decay, rest = self._along_weights()
        if rest <= near:
            meant = -self.part.learning_rate * self.part.decay
            return UpdateMismatch.DECAY, decay / meant if meant else math.nan, ""
        if self["still_rows"]:
            return UpdateMismatch.ROWS, self["still_rows"] / self["rows"], ""
        return UpdateMismatch.CHANGED, math.nan, ""

    def _along_weights(self) -> tuple[float, float]:
        """Fit the difference by multiples of weights and update; return the first, and the rest."""
        along: Floats = np.array([self["along_weights"], self["product"] - self["expected"]])
        both = self["turned_weights"]
        update = self["expected"]
        fit = np.linalg.pinv(np.array([[self["weights"], both], [both, update]])) @ along
        return float(fit[0]), math.sqrt(max(self["distance"] - float(fit @ along), 0.0))

    def _describe(self, how: UpdateMismatch, factor: float = math.nan, axis: str = "") -> OddUpdate:
        sizes = self.norm("expected") * self.norm("actual")
        error, bound = self.relative
        return OddUpdate(
            name=self.part.name,
            how=how,
            optimizer=self.part.optimizer,
            ranks=self.ranks,
            cosine=self["product"] / sizes if sizes else math.nan,
            ratio=self.norm("actual") / self.norm("expected") if self["expected"] else math.inf,
            error=error,
            bound=bound,
            factor=factor,
            axis=axis,
        )


def judge_update(shares_W: Sequence[UpdateShare]) -> UpdateVerdict:
    """Return whether the optimizers' updates are those of whole parameters."""
    by_name: dict[str, dict[int, PartOfUpdate]] = {}
    for rank, share in enumerate(shares_W):
        for part in share.parts:
            by_name.setdefault(part.name, {})[rank] = part
    compared = dict[str, float]()
    unseen = list[str]()
    odd = list[OddUpdate]()
    resting = []
    later = []
    for name, parts in by_name.items():
        updates = [_Update([part], (rank,)) for rank, part in parts.items()]
        if any(part.shared for part in parts.values()):
            updates = [_Update(list(parts.values()), ())]
        if not all(one.finite for one in updates):
            unseen.append(name)
            continue
        found = [each for one in updates for each in one.odd()]
        odd += _merged(found, len(parts))
        clear = [one for one in updates if one.seen and one.agrees]
        if clear:
            compared[name] = max(one.relative[0] for one in clear)
        elif not found:
            unseen.append(name)
        driven = sum(one["driven"] for one in updates)
        still = sum(one["resting"] for one in updates)
        if still > _RESTING * driven and not any(part.random for part in parts.values()):
            resting.append((name, still / driven))
        changed = [
            one.norm("later") / one.norm("expected") for one in updates if one.changes("later")
        ]
        if changed:
            later.append((name, max(changed)))
    worst = max(compared, key=lambda name: compared[name], default="")
    kinds = dict.fromkeys(p.optimizer for parts in by_name.values() for p in parts.values())
    return UpdateVerdict(
        compared=tuple(compared),
        unseen=tuple(unseen),
        resting=tuple(resting),
        later=tuple(later),
        odd=tuple(odd),
        error=compared.get(worst, 0.0),
        parameter=worst,
        optimizers=tuple(kinds),
    )


def _merged(found: Sequence[OddUpdate], num_workers: int) -> Iterator[OddUpdate]:
    """Yield what differs on several workers in one way as one."""
    by_how: dict[UpdateMismatch, list[OddUpdate]] = {}
    for one in found:
        by_how.setdefault(one.how, []).append(one)
    for same in by_how.values():
        ranks = tuple(rank for one in same for rank in one.ranks)
        first = max(same, key=lambda one: one.error)
        yield replace(first, ranks=() if len(ranks) == num_workers else ranks)
