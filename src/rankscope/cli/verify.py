"""``rankscope verify``: the result of a run's reference steps, with an exit code for CI."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rankscope.bus.finding import Finding, Severity
from rankscope.cli.output import JsonOption, plain, show, terminal
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.verdict.assessment import coordinate_of, siblings_of
from rankscope.verdict.words import LOOKS

RIGHT = "right"
WRONG = "wrong"
UNKNOWN = "unknown"
_CODES = {RIGHT: 0, WRONG: 1, UNKNOWN: 2}
_AGREES = "verify.agrees"
_COMPUTED_AGAIN = ("verify.", "update.")
_HEALTHY = (_AGREES, "update.agrees")
_NO_ANSWER = ("verify.declined", "update.declined")
_CONTRADICTS = ("sync.", "state.parameters_differ", "state.replicas_differ")
"""Causes of errors with which no gradient is that of one process."""


def verify(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    as_json: JsonOption = False,
) -> None:
    """Check that the optimizer got the gradient that one process would compute, and applied it.

    Needs a run with a reference step: torchrun … -m rankscope run --verify-at 20 SCRIPT. The other
    runs of the same job (stages, coordinates of a mesh) count, too.
    Exit code: 0 all reference steps agree; 1 one differs, or the workers do; 2 none has an answer,
    or bad input.
    """
    run = Run.open(path)
    found = {coordinate_of(run.info): run.findings()}
    found |= {one.ranks: one.findings for one in siblings_of(run)}
    placed = [(place, finding) for place, each in found.items() for finding in each]
    steps = [one for one in placed if one[1].cause.startswith(_COMPUTED_AGAIN)]
    if not steps:
        raise RunError(
            f"no reference step has ended in {path}: train with rankscope run --verify-at 20, or "
            "watch(verify_at=[20]), beyond that step"
        )
    steps += [
        (place, finding)
        for place, finding in placed
        if finding.severity is Severity.ERROR and finding.cause.startswith(_CONTRADICTS)
    ]
    findings = [finding for _, finding in steps]
    answer = _answer(findings)
    if as_json:
        print(json.dumps({"answer": answer, "steps": [one.to_json() for one in findings]}))
    else:
        for place, finding in steps:
            healthy = finding.cause in _HEALTHY
            sign, colour, _ = LOOKS["healthy" if healthy else str(finding.severity)]
            where = f"{place}: " if place else ""
            show(terminal(), plain(f"{sign} {where}{finding.explanation}", colour))
    if _CODES[answer]:
        raise typer.Exit(_CODES[answer])


def _answer(steps: list[Finding]) -> str:
    """Return the answer of all steps; one not checked, or with an unclear factor, is no proof."""
    causes = {finding.cause for finding in steps}
    if any(finding.severity >= Severity.WARNING for finding in steps):
        return WRONG
    return RIGHT if _AGREES in causes <= {*_HEALTHY, *_NO_ANSWER} else UNKNOWN
