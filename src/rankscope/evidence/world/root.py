"""Finds groups of a job that train a model or its replicas apart, and odd divisors of experts."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.director import DirectedRun, Director
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.packing import unpack_headed
from rankscope.bus.plan import Plan
from rankscope.bus.rules import finding_of
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.world.unit import (
    MOST_UNITS,
    Unit,
    first_apart,
    is_same_model,
    replicas_apart,
)
from rankscope.files import parse, read_file

_log = logging.getLogger("rankscope")

PART = "sync.part_of_ranks"
DIVISOR = "sync.expert_divisor"
REPLICAS = "replicas-of-groups-differ"
"""Key of the finding of replicas along an axis that no wrapper names."""

_MOST_NAMED = 3
_EXPERTS = ("ep", "expert", "moe")  # names of axes along which ranks hold other experts
_SCALED = 0.01  # relative difference of two scales that is none


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
        self._first_step = first_step
        self._report = report
        self._group_seed = group_seed
        self._independent = independent
        self.findings: dict[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Compare a rank's units with those that it has read of others."""
        try:
            (num_own, sizes), packed = unpack_headed(content)
            ends = list(accumulate(sizes))
            units = [
                Unit.from_json(json.loads(bytes(packed[end - size : end])))
                for size, end in zip(sizes, ends, strict=True)
            ]
        except (TypeError, ValueError, AttributeError) as error:
            _log.debug("what a rank sent of the job cannot be read: %s", error)
            return
        own, others = units[:num_own], units[num_own:]
        for unit in own:
            counterparts = [one for one in others if one.main == unit.main]
            finding = self._part_of_ranks(unit, counterparts, step)
            if finding is None and not unit.main:
                main = next((one for one in (*own, *others) if one.main), None)
                finding = self._divisor(unit, main, counterparts, step)
            for one in (finding, self._replicas(unit, counterparts, step)):
                if one is not None and self._is_news(one):
                    self.findings[one.id] = one
                    self._report(one)

    def _is_news(self, finding: Finding) -> bool:
        known = self.findings.get(finding.id)
        return (
            known is None
            or known.severity < finding.severity
            or (known.explanation != finding.explanation and known.severity == finding.severity)
        )

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
        without = (
            f" without {listed(missing)}" if missing else f" of {count(len(unit.ranks), 'rank')}"
        )
        if not unit.main and (not missing or any(name.startswith(_EXPERTS) for name in missing)):
            severity = Severity.NOTE  # they may be experts that begin with equal values
        fields = {
            "size": len(unit.ranks),
            "total": f"at least {total}" if len(others) >= MOST_UNITS - 1 else total,
            "what": "all parameters" if unit.main else _named(unit.names),
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
        first = self._first_step + min(first for first, _ in apart.values())
        groups = sorted([unit.ranks, *apart])
        names = next(iter(apart.values()))[1]
        fields = {
            "names": _named(names),
            "groups": _listed_groups(groups),
            "first": f"{first:,}",
        }
        numbers = {"groups": [list(ranks) for ranks in groups], "parameters": names}
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
            "names": _named(unit.names),
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


def _named(names: Sequence[str]) -> str:
    more = ["others"] if len(names) > _MOST_NAMED else []
    return listed([*names[:_MOST_NAMED], *more])


def _listed_groups(groups: Sequence[Sequence[int]]) -> str:
    named = [name_ranks(ranks) for ranks in groups[:_MOST_NAMED]]
    rest = len(groups) - len(named)
    return "; ".join([*named, *([count(rest, "other group")] if rest else [])])


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
