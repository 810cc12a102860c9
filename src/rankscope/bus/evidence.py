"""The declaration of one kind of evidence.

A kind of evidence is a package with up to five parts, each found by its name:

- its declaration, in ``__init__``: columns of the record and arrays of a step's message;
- ``probe.py`` measures it in the training process (torch): ``make_probe(job)``;
- ``combine.py`` turns messages into a step (numpy): ``make_combiner(layout)``, ``derive``;
- ``judge.py`` compares workers and finds faults at the root (numpy): ``make_judges(run)``;
- ``findings.toml``: titles, explanations, next checks, and the text of the page of causes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from rankscope.bus.columns import Column


class Array(NamedTuple):
    """A named array of one worker and step, of any length: ids, losses, sketches.

    Attributes:
        name: Name in messages; its last letter names its axis.
        dtype: Type of its elements.
        bulk: Whether it is left out while the agent does not keep up.
    """

    name: str
    dtype: type[np.generic]
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """One kind of evidence.

    Attributes:
        name: Its name.
        package: The package that holds its parts.
        columns: Columns of the record.
        arrays: Arrays that a worker sends in a step's message, besides LOCAL columns.
    """

    name: str
    package: str
    columns: tuple[Column, ...] = ()
    arrays: tuple[Array, ...] = ()

    def find(self, module: str, name: str) -> Any:
        """Return a name of one of its modules; None where it has no such module or name."""
        path = f"{self.package}.{module}"
        if find_spec(path) is None:
            return None
        return getattr(import_module(path), name, None)

    @property
    def findings(self) -> str:
        """Its findings as TOML; empty where it has none."""
        place = files(self.package).joinpath("findings.toml")
        return place.read_text("utf-8") if place.is_file() else ""


def arrays_of(evidence: Iterable[Evidence]) -> tuple[Array, ...]:
    """Return the arrays of a step's message, in order."""
    return tuple(array for each in evidence for array in each.arrays)
