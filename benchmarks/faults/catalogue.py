"""The fault catalogue: what each fault is expected to show, stated before any run."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from rankscope import Severity

FILE = Path(__file__).with_name("catalogue.toml")


class UsageError(Exception):
    """What was asked for cannot be run."""


class FaultClass(StrEnum):
    """What kind of evidence shows a fault."""

    EXACT = "exact"
    STATISTICAL = "statistical"
    PLAN = "plan"
    TWO_RUNS = "two runs"
    NONE = "none"
    HEALTHY = "healthy"


class Hits(StrEnum):
    """Which workers a fault hits: one, or all but rank 0, which a finding has to name; or all."""

    ONE = "one"
    OTHERS = "others"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the catalogue.

    Attributes:
        id: Short name, such as ``D1``; that of a healthy look-alike begins with H.
        mechanism: What goes wrong, in a sentence.
        fault_class: What kind of evidence shows it.
        causes: Causes that a finding may name; empty where none is expected.
        severity: Least severity of such a finding; None where none is expected.
        hits: Which workers it hits.
        seen: Public reports.
        evidence: What evidence there is, where the class alone does not say it.
        missing: Why it is not reproduced; empty where it is.
    """

    id: str
    mechanism: str
    fault_class: FaultClass
    causes: tuple[str, ...] = ()
    severity: Severity | None = None
    hits: Hits = Hits.ALL
    seen: tuple[str, ...] = ()
    evidence: str = ""
    missing: str = ""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong: a look-alike."""
        return self.fault_class is FaultClass.HEALTHY

    @property
    def expects_finding(self) -> bool:
        """Whether a finding is expected."""
        return self.severity is not None

    @property
    def expects_or_healthy(self) -> bool:
        """Whether the catalogue states what is to be found: a finding, or none."""
        return self.expects_finding or self.healthy

    @property
    def least(self) -> Severity:
        """Least severity of a finding of an expected cause."""
        return self.severity or Severity.NOTE

    @property
    def threshold(self) -> Severity:
        """Least severity of a finding that counts: a warning, or a note where one is expected."""
        return Severity.NOTE if self.severity is Severity.NOTE else Severity.WARNING


@cache
def catalogue() -> Mapping[str, Fault]:
    """Return all faults and healthy look-alikes by id, in the order of the table."""
    entries = tomllib.loads(FILE.read_text("utf-8"))
    return {name: _fault(name, entry) for name, entry in entries.items()}


def select(ids: list[str]) -> list[Fault]:
    """Return faults by id, in the order given; case does not matter.

    Raises:
        UsageError: There is no such fault.
    """
    known = catalogue()
    unknown = [name for name in ids if name.upper() not in known]
    if unknown:
        raise UsageError(
            f"expected ids of the fault catalogue, got {', '.join(unknown)}; see {FILE}"
        )
    return [known[name.upper()] for name in ids]


def _fault(name: str, entry: Mapping[str, Any]) -> Fault:
    least = entry.get("severity")
    return Fault(
        id=name,
        mechanism=entry["mechanism"],
        fault_class=FaultClass(entry["class"]),
        causes=tuple(entry.get("causes", ())),
        severity=None if least is None else Severity[least.upper()],
        hits=Hits(entry.get("hits", "all")),
        seen=tuple(entry.get("seen", ())),
        evidence=entry.get("evidence", ""),
        missing=entry.get("missing", ""),
    )
