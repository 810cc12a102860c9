"""The registry: all kinds of evidence, the only place that names them.

Record, messages, judges, report and sinks are loops over :data:`EVIDENCE`. Kinds of your own join
by the environment variable ``RANKSCOPE_EVIDENCE``: names of importable packages, separated by
commas, each with an ``EVIDENCE`` of its own. All processes of a run need the same ones.
"""

import functools
import logging
import os
from difflib import get_close_matches
from importlib import import_module

from rankscope.bus.evidence import KEYS, Column, Evidence, Source, Table
from rankscope.errors import UsageError
from rankscope.stats.arrays import digest_of

_log = logging.getLogger("rankscope")

VARIABLE = "RANKSCOPE_EVIDENCE"

NAMES = (
    *("samples", "loss", "gradient", "reduction", "clipping", "state", "mesh", "optimizer"),
    *("randomness", "environment", "outliers", "rollouts", "canary", "dispersion"),
    *("reference", "update", "timing", "world", "axes", "joined", "parity", "copies"),
)


def _load() -> tuple[Evidence, ...]:
    own = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    found = [import_module(f"{__name__}.{name}").EVIDENCE for name in NAMES]
    for package in own:
        try:
            found.append(import_module(package).EVIDENCE)
        except (ImportError, AttributeError) as error:
            _log.warning("rankscope leaves out the evidence %r of %s: %s", package, VARIABLE, error)
    return tuple(found)


EVIDENCE = _load()
"""All kinds of evidence, in the order of their columns."""

COLUMNS: tuple[Column, ...] = (*KEYS, *(c for each in EVIDENCE for c in each.columns))
"""All columns of all tables."""

_BY_NAME = {(column.table, column.name): column for column in COLUMNS}
assert len(_BY_NAME) == len(COLUMNS), "a column is declared twice"


def columns_of(table: Table, *sources: Source) -> tuple[Column, ...]:
    """Return the columns of one table in order, all or those of the given sources."""
    return tuple(
        column
        for column in COLUMNS
        if column.table is table and (not sources or column.source in sources)
    )


def compared_columns(table: Table) -> tuple[Column, ...]:
    """Return the columns of one table in which detectors compare the workers, in order."""
    return tuple(column for column in columns_of(table) if column.compared is not None)


def find_column(table: Table, name: str) -> Column:
    """Return the declaration of one column.

    Raises:
        UsageError: There is no such column.
    """
    try:
        return _BY_NAME[table, name]
    except KeyError:
        there = [each for each in Table if (each, name) in _BY_NAME]
        elsewhere = f" ({name} is a column of {', '.join(there)})" if there else ""
        known = [each.name for each in columns_of(table)]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise UsageError(f"expected columns of {table}, got {name!r}{elsewhere}; {hint}") from None


@functools.cache
def schema_hash() -> int:
    """Return a 63-bit digest of all declarations; equal on workers that can talk to each other."""
    columns = [f"{c.table} {c.name} {c.dtype} {c.source}" for c in COLUMNS]
    arrays = [f"{a.name} {a.dtype.__name__}" for each in EVIDENCE for a in each.arrays]
    return digest_of("\n".join([*columns, *arrays]).encode())
