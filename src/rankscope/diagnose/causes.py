"""Which of several findings is the cause, and which are its consequences.

One fault leaves many traces: when a worker's gradients are not reduced, its parameters drift, and
its loss follows. The table of causes says what explains what (``explains`` in ``rules.toml``).
"""

from collections.abc import Iterable, Mapping, Sequence

from rankscope.core.finding import Finding
from rankscope.diagnose.rules import RULES

LATENESS = 192
"""Steps by which a cause may be found later than its consequence: digests take turns."""


def explained_by(finding: Finding, others: Iterable[Finding]) -> Finding | None:
    """Return the finding of which this one is a mere consequence, None if there is none.

    Args:
        finding: The finding.
        others: All findings of the run.
    """
    for other in others:
        if other.id != finding.id and _explains(other, finding):
            return other
    return None


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with the most probable cause first, consequences of others last.

    Args:
        findings: All findings of a run.

    Returns:
        The same findings: those that nothing explains first; among them the most severe, open
        before closed, then the earliest.
    """
    consequence: Mapping[str, bool] = {
        finding.id: explained_by(finding, findings) is not None for finding in findings
    }
    return sorted(
        findings,
        key=lambda f: (consequence[f.id], -f.severity, f.status != "open", f.first_step),
    )


def _explains(cause: Finding, effect: Finding) -> bool:
    rule = RULES.get(cause.id) or RULES.get(cause.cause)
    if rule is None or cause.severity < effect.severity:
        return False
    named = effect.cause in rule.explains or effect.id in rule.explains
    return named and cause.first_step <= effect.first_step + LATENESS
