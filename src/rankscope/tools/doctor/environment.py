"""Whether all ranks have the same versions, devices, flags, variables and source revision."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.bus.environment import is_compared
from rankscope.bus.words import count
from rankscope.evidence.environment.facts import environment_facts, source_revision
from rankscope.evidence.environment.judge import compare_facts
from rankscope.tools.doctor.stage import Bench, CheckResult, Facts, Stage, Status, listed

NAME = "environment"


def look(bench: Bench) -> Facts:
    """Return the environment of this rank; the source revision is that of the current folder."""
    facts: dict[str, Any] = dict(environment_facts(bench.device))
    for name in ("revision", "revision_changed"):
        facts.pop(name, None)  # of the preflight's own files
    return {**facts, **source_revision(Path.cwd())}


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Name the differences between ranks, the gravest first, as a run's detector does."""
    odd, words, severity = compare_facts(facts)
    compared = sum(map(is_compared, {name for fact in facts for name in fact}))
    numbers = {"compared": compared, "different": list(words)}
    if odd:
        status = Status[severity.name]
        found = listed(words, 5, between="; ")
        return [CheckResult(NAME, status, found, _ADVICE[status], numbers, odd)]
    versions = (f"{name} {facts[0][name]}" for name in _VERSIONS if name in facts[0])
    found = f"{count(compared, 'fact')} alike: {', '.join(versions)}"
    return [CheckResult(NAME, Status.OK, found, numbers=numbers)]


_VERSIONS = ("python", "torch", "numpy")
_ADVICE = {
    Status.NOTE: "Usually harmless; make these settings equal if runs must repeat.",
    Status.WARNING: "Ranks that compute with other software, sources, flags or devices have other "
    "gradients: bring all hosts to the same commit, install the same on them, and set flags on all "
    "ranks alike.",
}


STAGE = Stage(NAME, look, judge, needs_group=False)
