"""Announcements during the training: findings that open, get worse or close, and the verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.bus.words import count, name_ranks
from rankscope.verdict.assessment import Sibling, worst_of
from rankscope.verdict.coverage import MeasuredParts, checks_of, missing_steps
from rankscope.verdict.rules import (
    explanations,
    faults_in_words,
    first_sentence,
    ranked,
    section_of,
    settles,
)
from rankscope.verdict.words import consequence_of, title_of_finding

MOST_LINES = 20  # lines about single findings in one run: a log that scrolls is not read


class Announcer:
    """Writes a line for each change of warnings and errors, and the verdict at the end.

    Notes, and findings that another one explains, are only counted at the end; but a note that
    settles an announced finding is announced, too. ``write`` gets each line, and whether it is
    about a fault. ``where`` begins each line: the place of a run among those of its job, if there
    are several.
    """

    def __init__(self, write: Callable[[str, bool], None], where: str = "") -> None:
        self._write = write if not where else lambda line, bad: write(f"{where}: {line}", bad)
        self._num_lines = 0
        self._announced: set[str] = set()

    def announce(
        self, changed: Sequence[tuple[Finding, FindingEvent]], known: Sequence[Finding]
    ) -> None:
        """Announce changed findings, each with its event; ``known`` are all of the run."""
        news = [one for one in changed if self._should_announce(*one, known)]
        if not news:
            return
        causes = explanations(known)
        for finding, event in news:
            if event is not FindingEvent.CLOSED and causes.get(finding.id) is not None:
                continue
            self._num_lines += 1
            if self._num_lines > MOST_LINES:
                if self._num_lines == MOST_LINES + 1:
                    self._write("Further findings are only recorded, not printed.", True)
                return
            self._announced.add(finding.id)
            self._write(line_of(finding, event), event is not FindingEvent.CLOSED)

    def _should_announce(
        self, finding: Finding, event: FindingEvent, known: Sequence[Finding]
    ) -> bool:
        if event is FindingEvent.CLOSED:
            return finding.id in self._announced
        if finding.severity > Severity.NOTE:
            return True
        return any(settles(finding, one) for one in known if one.id in self._announced)

    def conclude(
        self,
        known: Sequence[Finding],
        *,
        num_steps: int,
        num_workers: int,
        options: object,
        coverage: MeasuredParts,
        siblings: Sequence[Sibling] = (),
    ) -> None:
        """Announce the verdict, from all findings of the run in their last state.

        Where this run has no fault, but another of its job has, that one's is announced. Others
        that are not judged to their end yet are counted.
        """
        if not num_steps:
            return
        missing = missing_steps(checks_of(num_workers, options), num_steps)
        seen = f"{count(num_steps, 'step')} of {count(num_workers, 'worker')}"
        clean = all(finding.severity <= Severity.NOTE for finding in known)
        own = verdict_line(known, coverage, missing)
        worst = worst_of(siblings)
        verdict = worst.sentence if worst is not None and clean else own
        unfinished = sum(each.status == "running" for each in siblings)
        if unfinished:
            verdict += f" {count(unfinished, 'other run')} of this job: not yet judged."
        self._write(f"{seen}: {verdict}", False)


def line_of(finding: Finding, event: FindingEvent, text: str = "") -> str:
    """Return a change of a finding in one line, with its first sentence or another ``text``."""
    who = f" ({name_ranks(finding.ranks)})" if finding.ranks else ""
    if event is FindingEvent.CLOSED and not text:
        return (
            f"closed: {_name_of(finding)}{who} has not been seen since step {finding.last_step:,}."
        )
    marks = {FindingEvent.CLOSED: "closed", FindingEvent.WORSE: f"now {finding.severity}"}
    mark = marks.get(event, str(finding.severity))
    since = f"since step {finding.first_step:,}"
    return f"{mark}: {text or first_sentence(finding)} [{_name_of(finding)}, {since}]"


def with_causes(findings: Sequence[Finding], known: Iterable[Finding]) -> list[Finding]:
    """Return findings for sinks: one that another of the ``known`` explains refers to that one."""
    causes = explanations(tuple(known)) if findings else {}
    found = [(finding, causes.get(finding.id)) for finding in findings]
    return [f if c is None else replace(f, next_check=consequence_of(c)) for f, c in found]


def _name_of(finding: Finding) -> str:
    """Return the name under which ``rankscope causes`` and the report have a finding."""
    return section_of(finding.id.split(":")[0], finding.cause)


def verdict_line(findings: Sequence[Finding], coverage: MeasuredParts, missing: int = 0) -> str:
    """Return all findings in one line, the worst in words; ``missing``: further steps needed."""
    faults = [finding for finding in findings if finding.severity > Severity.NOTE]
    notes = len(findings) - len(faults)
    if not faults:
        title = title_of_finding(ranked(findings)[0]) if notes else ""
        first = f"note: {title}" if notes == 1 else f"{count(notes, 'note')}, first: {title}"
        noted = f" ({first})" if notes else ""
        joint = "; " if coverage.limits else ", but "
        waits = missing and coverage.enough
        more = f"{joint}some checks need {count(missing, 'more step')}" if waits else ""
        return f"{coverage.verdict}{noted}{more}."
    closed = sum(finding.status == "closed" for finding in faults)
    few = f", {closed} of them closed" if closed else ""
    every = ", closed" if closed == 1 else ", all closed"
    kept = every if closed == len(faults) else few
    return f"{faults_in_words(faults)}{kept}. {first_sentence(ranked(faults)[0], findings)}"
