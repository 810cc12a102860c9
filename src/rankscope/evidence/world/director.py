"""Finds groups of a job that train a model or its replicas apart, and odd divisors of experts.

A group that reduces only among its own ranks sees nothing of another group with the same model. So
each group's first rank publishes a few elements of its parameters, from step to step. Two groups
that begin with equal elements and apply different updates train two models.

Groups that draw the same batches share the work on each sample, as tensor-parallel ranks do: they
hold other parts of some parameters, and replicas of the rest, which must stay equal.

Legend of shapes: E elements; P parameters, of each of which the same number of elements is read.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from rankscope.bus.detector import FaultEvidence, finding_of
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.plan import Plan
from rankscope.bus.probe import DirectedRun, Director
from rankscope.bus.shares import Packable, PackedError
from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.files import parse, read_file
from rankscope.stats.arrays import Bools, Floats, Floats32
from rankscope.stats.rounding import UNIT_ROUNDOFF

PART = "sync.part_of_ranks"
DIVISOR = "sync.expert_divisor"
REPLICAS = "replicas-of-groups-differ"
"""Key of the finding of replicas along an axis that no wrapper names."""

_MOST_NAMED = 3
_EXPERTS = ("ep", "expert", "moe")  # names of axes along which ranks hold other experts
_SCALED = 0.01  # relative difference of two scales that is none

MOST_UNITS = 64
"""Groups of a job that are compared."""

_APART = 1 / 16
"""Distance of two updates, relative to the larger one, that rounding may explain: as of replicas
that compute in bfloat16 by themselves, see :func:`rankscope.stats.rounding.tolerance_of`."""

_REPLICAS_APART = 1 / 64
"""The same for replicas of ranks that share the work on one sample."""

_ROUNDINGS = 4  # of an element in an update
_FEWEST_DISTINCT = 8  # elements that begin with one constant prove nothing
_NO_ELEMENTS = np.empty(0, np.float32)
_COARSEST = UNIT_ROUNDOFF["bfloat16"]

ELEMENTS = 4
"""Elements of each parameter that are read."""


@dataclass(slots=True)
class Unit(Packable):
    """The parameters that one group of ranks reduces together, as its first rank publishes them.

    An age is the number of steps since the run began.
    """

    ranks: tuple[int, ...]  # of the job, that reduce them
    main: bool  # they are most of their run's; others are reduced over fewer ranks
    layout: int  # digest of their names, shapes and types
    names: tuple[str, ...]  # of the parameters that are read
    dtype: str  # of most of them
    divisor: float  # of the sum of gradients; 0 if unknown
    wrapper: str  # what reduces them, in words
    axes: Mapping[str, tuple[int, ...]]  # ranks of the job along other axes of their mesh
    given_dir: str  # the run directory that the user gave
    seed: int  # of the first rank
    scale: float | None = None  # of the reduced gradient, by the training, relative to the main's
    whole: bool = True  # the first rank runs all of the model, not a stage given activations
    readings: dict[int, Floats32] = field(default_factory=dict)  # by age: elements ``[E]``
    settings: dict[int, int] = field(default_factory=dict)  # by age: digest of the optimizer's
    batches: dict[int, int] = field(default_factory=dict)  # by age: digest of the first rank's

    def elements(self, age: int) -> Floats:
        """Return the elements ``[E]`` so many steps after the run began; empty if unknown."""
        return self.readings.get(age, _NO_ELEMENTS).astype(np.float64)


@dataclass(frozen=True, slots=True)
class UnitsOfJob(Packable):
    """Units, packed: those that a rank is the first of, and those that it has read of others."""

    own: tuple[memoryview, ...]
    others: tuple[memoryview, ...]


def _have_one_form(one: Unit, other: Unit) -> bool:
    """Return whether two groups without a common rank have equal layouts of whole models."""
    apart = not set(one.ranks) & set(other.ranks)
    return one.layout == other.layout and one.whole and other.whole and apart


def is_same_model(one: Unit, other: Unit) -> bool:
    """Return whether two groups began with one model: equal layout, and equal elements."""
    begins_E = one.elements(0)
    return (
        _have_one_form(one, other)
        and len(np.unique(begins_E)) >= _FEWEST_DISTINCT
        and np.array_equal(begins_E, other.elements(0))
    )


class Replicas(NamedTuple):
    """Replicas of two groups of ranks that are trained apart."""

    first: int  # the first age at which they are
    names: list[str]
    maybe: list[str]  # parameters that begin with one constant, and are apart as well


def replicas_apart(one: Unit, other: Unit) -> Replicas | None:
    """Return the replicas of two groups that share each sample and differ; None if there are none.

    Parameters that begin with equal values are replicas, unless these are constant; there must be
    others, of which the groups hold parts. All replicas that move have to differ: a part that
    begins with the values of another part may move as it likes.
    """
    ages = _common_ages(one, other, same_batches=True)
    begins_PE = one.elements(0)
    other_PE = other.elements(0)
    if not ages or not _have_one_form(one, other) or begins_PE.shape != other_PE.shape:
        return None
    begins_PE, other_PE = begins_PE.reshape(-1, ELEMENTS), other_PE.reshape(-1, ELEMENTS)
    equal_P = (begins_PE == other_PE).all(axis=1)
    replicas_P = equal_P & (np.ptp(begins_PE, axis=1) > 0)
    if equal_P.all() or not replicas_P.any():
        return None
    since: list[int] = []
    found: list[Bools] = []
    for at in ages:
        moved_P, apart_P = _apart(one, other, at, _REPLICAS_APART, ELEMENTS)
        if not moved_P[replicas_P].any() or not apart_P[replicas_P & moved_P].all():
            break
        since.append(at)
        found.append(apart_P)
    if len(since) < 2:
        return None
    kinds = (replicas_P & found[0], equal_P & ~replicas_P & found[0])
    names, maybe = ([one.names[p] for p in np.flatnonzero(kind_P)] for kind_P in kinds)
    return Replicas(since[-1] - 1, names, maybe)


def first_apart(one: Unit, other: Unit) -> int | None:
    """Return the first step whose updates differ, and after which the groups never agree again.

    None while fewer than two readings show it, where the optimizer's settings differ, and where
    both first ranks draw the same batches: those share the work on each sample.
    """
    ages = _common_ages(one, other, same_batches=False)
    size = len(one.elements(0))
    apart = list(takewhile(lambda at: _apart(one, other, at, _APART, size)[1].all(), ages))
    return apart[-1] - 1 if len(apart) > 1 else None


def _common_ages(one: Unit, other: Unit, *, same_batches: bool) -> list[int]:
    """Return the ages at which two groups are read, from the last one; none of unlike groups.

    Those have other settings of the optimizer, or draw the same batches or not, as it is not asked.
    """
    ages = one.readings.keys() & other.readings.keys() - {0}
    drawn = one.batches.keys() & other.batches.keys()
    are_same = all(one.batches[at] == other.batches[at] for at in drawn)
    set_alike = all(one.settings.get(at) == other.settings.get(at) for at in ages)
    return sorted(ages, reverse=True) if drawn and are_same == same_batches and set_alike else []


def _apart(one: Unit, other: Unit, at: int, share: float, width: int) -> tuple[Bools, Bools]:
    """Return which parameters have moved in a group, and which of them differ between two.

    Each has so many elements; rounding may explain a difference of this share of an update.
    """
    begins_PE = one.elements(0).reshape(-1, width)
    moved_PE, other_PE = (unit.elements(at).reshape(-1, width) - begins_PE for unit in (one, other))
    size_P = np.maximum(np.linalg.norm(moved_PE, axis=1), np.linalg.norm(other_PE, axis=1))
    rounding = _ROUNDINGS * at * UNIT_ROUNDOFF.get(one.dtype, _COARSEST)
    allowed_P = share * size_P + rounding * np.linalg.norm(begins_PE, axis=1)
    distance_P = np.linalg.norm(moved_PE - other_PE, axis=1)
    return size_P > 0, (size_P > 0) & (distance_P > allowed_P)


_log = logging.getLogger("rankscope")


class World(Director):
    """Compares this run's units with the others of the job."""

    def __init__(
        self,
        first_step: int,
        report: Callable[[Finding], None],
        group_seed: Callable[[], int | None],  # of all ranks of this run; None where they differ
        *,
        independent: bool = False,  # groups that never meet are trainings of their own on purpose
    ) -> None:
        super().__init__(report)
        self._first_step = first_step
        self._group_seed = group_seed
        self._independent = independent

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Compare a rank's units with those that it has read of others."""
        try:
            units = UnitsOfJob.unpack(content)
            own, others = (
                [Unit.unpack(one) for one in packed] for packed in (units.own, units.others)
            )
        except PackedError as error:
            _log.debug("what a rank sent of the job cannot be read: %s", error)
            return
        for unit in own:
            counterparts = [one for one in others if one.main == unit.main]
            finding = self._part_of_ranks(unit, counterparts, step)
            if finding is None and not unit.main:
                main = next((one for one in (*own, *others) if one.main), None)
                finding = self._divisor(unit, main, counterparts, step)
            for one in (finding, self._replicas(unit, counterparts, step)):
                if one is not None and not self._is_milder(one):
                    self.publish(one, facts=one.explanation)

    def _is_milder(self, finding: Finding) -> bool:
        """Return whether other units have shown the same, and worse."""
        known = self.findings.get(finding.id)
        return known is not None and known.severity > finding.severity

    def _part_of_ranks(self, unit: Unit, others: Sequence[Unit], step: int) -> Finding | None:
        apart = {
            other.ranks: (other, first)
            for other in others
            if is_same_model(unit, other) and (first := first_apart(unit, other)) is not None
        }
        if not apart or self._independent:
            return None
        found = [other for other, _ in apart.values()]
        first = self._first_step + min(first for _, first in apart.values())
        severity = min(self._severity(unit, other) for other in found)
        groups = sorted([unit.ranks, *apart])
        total = sum(map(len, groups))
        outside = {rank for ranks in apart for rank in ranks}
        missing = [name for name, line in unit.axes.items() if outside & set(line)]
        size = f" of {count(len(unit.ranks), 'rank')}"
        without = f" without {listed(missing)}" if missing else size
        if not unit.main and (not missing or any(name.startswith(_EXPERTS) for name in missing)):
            severity = Severity.NOTE  # they may be experts that begin with equal values
        fields = {
            "size": len(unit.ranks),
            "total": f"at least {total}" if len(others) >= MOST_UNITS - 1 else total,
            "what": "all parameters" if unit.main else shortened(unit.names, _MOST_NAMED),
            "groups": _listed_groups(groups),
            "how": f"{unit.wrapper}{without}",
            "first": f"{first:,}",
        }
        numbers = {"groups": [list(ranks) for ranks in groups], "axes": missing}
        return self._finding(PART, severity, fields, numbers, first, step)

    def _replicas(self, unit: Unit, others: Sequence[Unit], step: int) -> Finding | None:
        """Return a finding of replicas along an axis that no wrapper names, which drift apart."""
        apart = {other.ranks: found for other in others if (found := replicas_apart(unit, other))}
        if not apart or self._independent:
            return None
        first = self._first_step + min(one.first for one in apart.values())
        groups = sorted([unit.ranks, *apart])
        _, names, maybe = next(iter(apart.values()))
        fields = {
            "names": shortened(names, _MOST_NAMED),
            "maybe": _MAYBE.format(names=shortened(maybe, _MOST_NAMED)) if maybe else "",
            "groups": _listed_groups(groups),
            "first": f"{first:,}",
        }
        numbers = {"groups": [list(ranks) for ranks in groups], "parameters": names, "maybe": maybe}
        cause = "state.replicas_differ"
        return self._finding(cause, Severity.WARNING, fields, numbers, first, step, key=REPLICAS)

    def _severity(self, unit: Unit, other: Unit) -> Severity:
        """Return an error for what nobody can intend, a note for what looks like it."""
        seed = self._group_seed() if len(unit.ranks) > 1 else None
        apart = seed is not None and unit.seed != other.seed
        if unit.given_dir != other.given_dir or apart:
            return Severity.NOTE
        return Severity.ERROR if unit.main else Severity.WARNING

    def _divisor(
        self, unit: Unit, main: Unit | None, others: Sequence[Unit], step: int
    ) -> Finding | None:
        """Return a finding of experts on a mesh of their own whose divisor is not the rest's."""
        apart = [one for one in others if one.readings and not set(one.ranks) & set(unit.ranks)]
        if main is None or not unit.readings or not apart or unit.scale is None:
            return None
        times = main.divisor / unit.divisor * unit.scale
        if abs(times - 1) < _SCALED:
            return None
        if any(is_same_model(unit, one) for one in apart):
            return None  # replicas that are not reduced together, until their updates are known
        fields = {
            "names": shortened(unit.names, _MOST_NAMED),
            "divisor": f"{unit.divisor:g}",
            "main_divisor": f"{main.divisor:g}",
            "times": f"{times:g} times" if times > 1 else f"{1 / times:g} times",
            "as": "too large" if times > 1 else "too small",
            "first": f"{self._first_step:,}",
        }
        numbers = {"divisor": unit.divisor, "main_divisor": main.divisor}
        return self._finding(DIVISOR, Severity.WARNING, fields, numbers, self._first_step, step)

    def _finding(
        self,
        cause: str,
        severity: Severity,
        fields: Mapping[str, object],
        numbers: Mapping[str, object],
        first: int,
        step: int,
        key: str = "",
    ) -> Finding:
        last = max(first, step)
        evidence = FaultEvidence(cause, severity, (), first, last, 1, fields, numbers, key)
        return finding_of(evidence, step, begun_at=self._first_step)


_MAYBE = (
    " {names} began with one constant and differ as well: these are replicas, too, unless they are "
    "parts."
)


def _listed_groups(groups: Sequence[Sequence[int]]) -> str:
    named = [name_ranks(ranks, of_job=True) for ranks in groups]
    return shortened(named, _MOST_NAMED, "other group", between="; ")


def make_director(run: DirectedRun) -> World:
    """Return the director that compares the groups of a job."""

    def group_seed() -> int | None:
        try:
            ranks = parse(read_file(run.run_dir / "run.json"))["ranks"]
        except (OSError, ValueError, KeyError):
            return None
        seeds = {rank.get("seed") for rank in ranks}
        return seeds.pop() if len(seeds) == 1 else None

    independent = Plan.of(run.options.get("plan")).independent
    return World(run.first_step, run.report, group_seed, independent=independent)
