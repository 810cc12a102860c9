"""The checks of a run, declared by each kind of evidence.

Its ``judge.py`` has ``make_checks(run: CheckedRun) -> tuple[Check, ...]``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run is checked for.

    Attributes:
        what: The fault that it finds, in words.
        needs: Steps after which no finding means no fault.
        impossible: Why this run cannot show the fault; empty if it can.
        pending: Why it was not checked yet, whatever the number of steps; empty if it was.
    """

    what: str
    needs: int
    impossible: str = ""
    pending: str = ""


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Facts of a run that decide on its checks.

    Attributes:
        num_workers: W, at least 2.
        options: The options of ``watch``, as ``run.json`` has them.
        samples: Whether its samples were identified.
        canaries: Whether a canary has run; None if unknown.
    """

    num_workers: int
    options: Mapping[str, Any]
    samples: bool = True
    canaries: bool | None = None
