"""Ranks, lists and counts as words, and lines that a terminal may print."""

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

_IN_JOB: ContextVar[Sequence[int]] = ContextVar("ranks of a run's workers in the job", default=())


@contextlib.contextmanager
def ranks_of_job(info: Mapping[str, Any]) -> Iterator[None]:
    """Name a run's workers by their ranks in the job, wherever :func:`name_ranks` is called inside.

    The two differ where tensor or pipeline parallelism, for instance, splits the job into several
    data-parallel groups. ``info``: the content of ``run.json``.
    """
    job = info.get("job") or {}
    before = _IN_JOB.set(tuple(job.get("ranks", ())))
    try:
        yield
    finally:
        _IN_JOB.reset(before)


def name_ranks(ranks: Iterable[int], *, limit: int = 6, of_job: bool = False) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 0, 2 and 5–7``; long lists are cut.

    ``of_job``: the numbers are ranks of the job, not of the run's workers.
    """
    known = () if of_job else _IN_JOB.get()
    if known:
        ranks = [known[rank] if rank < len(known) else rank for rank in ranks]
    ordered = sorted(set(ranks))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1]
    ends = [*breaks, len(ordered)] if ordered else []
    runs = [ordered[start:end] for start, end in zip([0, *breaks], ends, strict=False)]
    named = [part for run in runs for part in ([run] if len(run) > 2 else [[rank] for rank in run])]
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in named]
    if len(texts) > limit:
        others = sum(map(len, named[limit:]))
        return f"ranks {', '.join(texts[:limit])} and {count(others, 'other')}"
    return f"rank {listed(texts)}" if len(ordered) == 1 else f"ranks {listed(texts)}"


def listed(words: Sequence[str]) -> str:
    """Return words as a list: ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def shortened(words: Sequence[str], most: int, rest: str = "other", *, between: str = "") -> str:
    """Return words as a list, those beyond a number counted: ``a, b and 12 others``."""
    more = [count(len(words) - most, rest)] if len(words) > most else []
    shown = [*words[:most], *more]
    return between.join(shown) if between else listed(shown)


def first_of(words: Sequence[str], most: int = 3, *, between: str = ", ") -> str:
    """Return the first words, and how many more there are: ``a, b, c and 2 more``."""
    more = f"{between.rstrip(', ')} and {len(words) - most} more" if len(words) > most else ""
    return between.join(words[:most]) + more


MOST_RECORDED = 64


def named(names: Sequence[str]) -> dict[str, object]:
    """Return names for the record, up to a number of them, and how many there are."""
    return {"names": list(names[:MOST_RECORDED]), "num_names": len(names)}


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def all_workers(number: int) -> str:
    """Return the words for all workers: ``both workers``, ``all 4 workers``."""
    return "both workers" if number == 2 else f"all {count(number, 'worker')}"


def dtype_name(dtype: object) -> str:
    """Return a type of torch's by its name alone: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def printable(words: str) -> str:
    """Return words with a space in place of each control character, fit for a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in words)


def name_modules(names: Sequence[str], all_names: Iterable[str]) -> str:
    """Return modules as words; one that is listed with all that it contains stands for these.

    The empty name is the whole model's.

    Example:
        >>> name_modules(["a", "a.x", "b.y"], ["", "a", "a.x", "b", "b.x", "b.y"])
        'a and b.y'
    """
    contained = Counter(part for name in all_names for part in _around(name))
    differing = Counter(part for name in names for part in _around(name))
    whole = {name for name in names if differing[name] == contained[name]}
    shown = [name for name in names if not whole.intersection(list(_around(name))[1:])]
    words = [name or "the whole model" for name in shown[:3]]
    more = len(shown) - len(words)
    return f"{', '.join(words)} and {more} more" if more else listed(words)


def _around(name: str) -> Iterator[str]:
    """Yield a module's name and those of all that contain it, up to the model's."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


TRACE = "trace"
"""Attribute of a record: the traceback of an error in another process, as words."""


def make_printable(record: logging.LogRecord) -> bool:
    """Replace the control characters of a record; a filter of a logger, which passes all.

    Names and paths that came from a script or a file then move no cursor, ring no bell, and begin
    no line of their own.
    """
    record.msg = printable(record.getMessage())
    record.args = ()
    trace = getattr(record, TRACE, "")
    if record.exc_info is not None and record.exc_info[1] is not None:
        trace = "".join(traceback.format_exception(record.exc_info[1]))
    if trace:  # formatters put it below the message
        record.exc_text = "\n".join(map(printable, trace.rstrip().split("\n")))
    return True
