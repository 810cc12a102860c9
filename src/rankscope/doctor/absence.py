"""Results for workers that failed, hang, have died or never came."""

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.diagnose.rules import name_ranks
from rankscope.doctor.meeting import Meeting
from rankscope.doctor.result import CheckResult, Status
from rankscope.doctor.stage import Stage

Word = Mapping[str, Any]
"""What one worker posted on a stage: ``facts``, ``error`` or ``usage``."""


def skipped(stage: Stage, why: str) -> CheckResult:
    """Return the result of a stage that was left out."""
    return CheckResult(stage.topic, stage.title, Status.SKIPPED, why)


def failed_somewhere(stage: Stage, words: Sequence[Word]) -> tuple[CheckResult, str]:
    """Return the result of a stage that raised on some workers, and why others are skipped.

    Args:
        stage: The stage.
        words: What each worker posted, in rank order.
    """
    by_error: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        error = word.get("error") or word.get("usage")
        if error:
            by_error.setdefault(str(error), []).append(rank)
    ranks = sorted(rank for group in by_error.values() for rank in group)
    told = "; ".join(f"{name_ranks(group)}: {error}" for error, group in by_error.items())
    everywhere = len(ranks) == len(words)
    advice = stage.advice or "See the exception; run this rank's function alone for its traceback."
    if not everywhere:
        advice += f" The other {'rank' if len(words) - len(ranks) == 1 else 'ranks'} had no error."
    result = CheckResult(
        stage.topic,
        stage.title,
        Status.ERROR,
        told,
        advice,
        {"errors": by_error},
        ranks=tuple(ranks),
    )
    return result, f"{stage.title} failed on {name_ranks(ranks)}"


def unfinished(
    stage: Stage, words: Mapping[int, Word], meeting: Meeting, seconds: float
) -> CheckResult:
    """Return the result of a stage that some workers did not finish in time.

    Args:
        stage: The stage.
        words: What came in time, by rank.
        meeting: Where the workers' other words are.
        seconds: How long the stage was allowed to take.
    """
    missing = [rank for rank in range(meeting.num_ranks) if rank not in words]
    places: dict[str, list[int]] = {}
    for rank, where in meeting.said(f"stuck/{stage.topic}").items():
        if rank in missing:
            places.setdefault(str(where), []).append(rank)
    errors = {rank: str(word["error"]) for rank, word in words.items() if "error" in word}
    silent = [rank for rank in missing if not any(rank in group for group in places.values())]
    arrivals = {rank: meeting.store.add(f"here/{rank}", 0) for rank in range(meeting.num_ranks)}
    never = [rank for rank in missing if not arrivals[rank]]
    twice = [rank for rank, number in arrivals.items() if number > 1]
    silent = [rank for rank in silent if rank not in never]
    told = [f"{name_ranks([rank])}: {error}" for rank, error in errors.items()]
    if never:
        came = meeting.num_ranks - len(never)
        told.append(
            f"{name_ranks(never)} did not start within {seconds:g} s; {came} of "
            f"{meeting.num_ranks} came"
        )
    if twice:
        told.append(f"{name_ranks(twice)} came more than once")
    if silent:
        told.append(f"{name_ranks(silent)} {_does(silent)} not answer any more")
    told += [
        f"{name_ranks(ranks)} did not finish within {seconds:g} s and {_is(ranks)} at {where}"
        for where, ranks in sorted(places.items(), key=lambda item: len(item[1]))
    ]
    return CheckResult(
        stage.topic,
        stage.title,
        Status.ERROR,
        "; ".join(told),
        _advice(never=never, errors=errors, places=places),
        {"missing": missing, "errors": errors, "places": places},
        ranks=tuple(sorted({*errors, *missing, *twice})),
    )


def gone_while_working(stage: Stage, gone: Sequence[int]) -> CheckResult:
    """Return the result of a stage in which the launcher ended all workers.

    Args:
        stage: The stage.
        gone: Ranks that had ended before that.
    """
    if not gone:
        found = "the launcher or a scheduler asked all ranks to end"
        return CheckResult(
            stage.topic, stage.title, Status.ERROR, found, "Start the preflight again."
        )
    return CheckResult(
        stage.topic,
        stage.title,
        Status.ERROR,
        f"{name_ranks(gone)} ended without a word, so the launcher ended the others",
        "A process that ends like this was killed (out of memory?) or crashed in a library: "
        "look at its exit code in the launcher's lines below, and at its host's system log.",
        ranks=tuple(gone),
    )


def _advice(
    *, never: Sequence[int], errors: Mapping[int, str], places: Mapping[str, Sequence[int]]
) -> str:
    if never:
        return (
            f"Look at the log and the host of {name_ranks(never)}: did the launcher start it, does "
            "it reach the others? If it is only slow to start, raise --seconds."
        )
    if errors:
        return f"Repair what failed on {name_ranks(list(errors))}; the others waited for it."
    if len(places) > 1:
        return (
            "Look at the rank that is at another place than the rest: ranks wait for each other in "
            "collectives. If the work takes that long, raise --seconds."
        )
    return "Look at that line. If the work does take that long, raise --seconds."


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _does(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"
