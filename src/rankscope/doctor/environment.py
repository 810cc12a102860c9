"""Whether all ranks run on the same: versions, devices, flags, variables, source revision."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.capture.state.environment import environment_facts, source_revision
from rankscope.core.environment import DECIDES_BITS, HARMLESS, is_compared
from rankscope.core.replicas import odd_ranks
from rankscope.diagnose.rules import count, name_ranks
from rankscope.doctor.stage import Bench, CheckResult, Facts, Stage, Status, listed, ranks_by

NAME = "environment"

_DECIDES_BITS = DECIDES_BITS | {"CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED"}
"""Variables that change what is computed, from run to run too, not only how fast."""


def look(bench: Bench) -> Facts:
    """Return what this rank runs on; the source revision is that of the current folder."""
    facts: dict[str, Any] = dict(environment_facts(bench.device))
    for name in ("revision", "revision_changed"):
        facts.pop(name, None)  # of the preflight's own files
    return {**facts, **source_revision(Path.cwd())}


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Name what differs between ranks, the gravest first."""
    names = sorted(filter(is_compared, {name for fact in facts for name in fact}))
    different = {
        name: [fact.get(name) for fact in facts]
        for name in names
        if len({repr(fact.get(name)) for fact in facts}) > 1
    }
    numbers = {"compared": len(names), "different": different}
    if not different:
        found = f"{count(len(names), 'fact')} alike: {_versions(facts[0])}"
        return [CheckResult(NAME, Status.OK, found, numbers=numbers)]
    ordered = sorted(different, key=lambda name: (-_status(name).level, name))
    told = [_in_words(name, different[name]) for name in ordered]
    odd = {r for name in ordered for r in odd_ranks([repr(v) for v in different[name]])}
    found = listed(told, 5, between="; ")
    advice = _advice(ordered)
    return [CheckResult(NAME, _status(ordered[0]), found, advice, numbers, tuple(sorted(odd)))]


def _status(name: str) -> Status:
    if name in HARMLESS or (name.isupper() and name not in _DECIDES_BITS):
        return Status.NOTE
    return Status.WARNING


def _advice(names: Sequence[str]) -> str:
    if _status(names[0]) is Status.NOTE:
        return "Usually harmless; make these settings equal if runs must repeat."
    if "revision" in names or "revision_changed" in names:
        return "Bring all hosts to the same commit of the training code, and the rest in line."
    return (
        "Ranks that compute with other software, flags or devices have other gradients: install "
        "the same on all hosts and set flags on all ranks alike."
    )


def _in_words(name: str, values: Sequence[Any]) -> str:
    groups = ranks_by(["not set" if value is None else str(value)[:40] for value in values])
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return f"{name}: {', '.join(f'{name_ranks(ranks)} {value}' for value, ranks in ordered[:3])}"


def _versions(fact: Facts) -> str:
    return ", ".join(
        f"{name} {fact[name]}" for name in ("python", "torch", "numpy") if name in fact
    )


STAGE = Stage(NAME, look, judge, needs_group=False)
