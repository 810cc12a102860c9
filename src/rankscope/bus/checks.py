"""What a run is checked for, as each kind of evidence declares it.

Its ``judge.py`` has ``make_checks(run: CheckedRun) -> tuple[Check, ...]``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run is checked for.

    Attributes:
        what: What it would find, in words.
        needs: Steps after which its silence means something.
        impossible: Why this run cannot show it; empty if it can.
    """

    what: str
    needs: int
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """What decides on the checks of a run.

    Attributes:
        num_workers: W, at least 2.
        options: The options of ``watch``, as ``run.json`` has them.
        samples: Whether its samples were identified.
    """

    num_workers: int
    options: Mapping[str, Any]
    samples: bool = True
