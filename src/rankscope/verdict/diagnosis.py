"""The diagnosis of a run: feeds steps to the detectors and turns evidence into findings.

A run's directory holds the state of its detectors at the last flush (``detectors.npz``). Later
steps are in the tables, and are diagnosed again from there. A run that continues it begins with the
final state (``detectors-start.npz``), and with the next step number.
"""

import logging
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rankscope.bus.detector import Detector, FaultEvidence, RunFacts, finding_of
from rankscope.bus.finding import Finding, FindingEvents, Severity
from rankscope.bus.plan import Plan
from rankscope.bus.replicas import minority_ranks
from rankscope.bus.step import GatheredStep, StepReport, as_recorded
from rankscope.bus.steps import RecentBatches, batches_of
from rankscope.bus.words import ranks_of_job
from rankscope.errors import RunError
from rankscope.evidence import EVIDENCE
from rankscope.files import to_plain
from rankscope.record import Run
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, read_state, unpack_state
from rankscope.stats.state import State, StateError

_log = logging.getLogger("rankscope")

_TOGETHER = 64  # steps of a record that are diagnosed at a time
_HANG = "time.hang"  # which agents find
_FIRST_STEPS = 16  # of a restarted job; a gradient scaler may skip its first updates


@cache
def _rules_of_directors() -> frozenset[str]:
    """Return the rules of the kinds of evidence that have no judge."""
    found = [each.findings for each in EVIDENCE if each.at_root("make_judges") is None]
    return frozenset(chain([_HANG], *map(tomllib.loads, found)))


def is_seen_live(finding: Finding) -> bool:
    """Return whether no table holds what a finding rests on: a new diagnosis cannot find it."""
    rules = {finding.cause, finding.id.partition(":")[0]}
    return not rules.isdisjoint(_rules_of_directors())


class Diagnosis:
    """Watches a run step by step; equal records give equal findings, live or afterwards.

    Each fault has one finding. It is recorded with each of its events, see
    :class:`~rankscope.bus.finding.FindingEvent`.
    """

    def __init__(self, run: RunFacts) -> None:
        self._run = run
        self._detectors = _judges_of(run)
        self._num_workers = run.num_workers
        self._batches = RecentBatches(run.num_workers)
        self.num_steps = 0  # diagnosed steps, with those of the runs that this one continues
        self._latest: dict[str, Finding] = {}
        self._events = FindingEvents()
        self._step = -1
        self._begun_at = 0
        self._first_steps = 0  # that are still to come, of a restarted job

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, each in its latest state, in order of appearance."""
        return tuple(self._latest.values())

    @property
    def next_step(self) -> int:
        """The first step number of a run that continues this one."""
        return self._step + 1

    def state(self) -> State:
        """Return the state of detectors and findings, as plain data."""
        return {
            "num_workers": self._num_workers,
            "num_steps": self.num_steps,
            "step": self._step,
            "batches": self._batches.state(),
            "detectors": {type(one).__name__: one.state() for one in self._detectors},
            "findings": [to_plain(finding.to_json()) for finding in self._latest.values()],
            "told": [[to_plain(f.to_json()), count] for f, count in self._events.reported],
        }

    def restore(self, state: State) -> None:
        """Continue from the state of another diagnosis, with its findings and spent budget."""
        detectors = {type(one).__name__: one for one in self._detectors}
        try:
            if state["num_workers"] != self._num_workers:
                raise StateError(f"it is of {state['num_workers']} workers")
            if state["detectors"].keys() != detectors.keys():
                raise StateError("it is of other detectors")
            for name, detector in detectors.items():
                detector.restore(state["detectors"][name])
            self._batches.restore(state["batches"])
            findings = [Finding.from_json(event) for event in state["findings"]]
            reported = [(Finding.from_json(event), int(count)) for event, count in state["told"]]
            self.num_steps = int(state["num_steps"])
            self._step = int(state["step"])
        except StateError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StateError(f"it is not the state of a diagnosis ({error!r})") from error
        self._latest = {finding.id: finding for finding in findings}
        self._events = FindingEvents()
        for finding, count in reported:
            self._events.note(finding, count)
        self._first_steps = _FIRST_STEPS

    def observe(self, report: StepReport) -> list[Finding]:
        """Diagnose one step as its record will hold it; return the findings to record."""
        (events,) = self.observe_many([report])
        return events

    def observe_many(self, reports: Sequence[StepReport]) -> list[list[Finding]]:
        """Diagnose consecutive steps, however many; return the findings of each to record."""
        recorded = [as_recorded(report) for report in reports]
        first = recorded[: self._first_steps]
        rest = recorded[self._first_steps :]
        self._first_steps -= len(first)
        found = []
        for one in first:
            closed = self._begin(one.gathered)
            [events] = self._observe([one])
            found.append([*closed, *events])
        return [*found, *self._observe(rest)]

    def _begin(self, first: GatheredStep) -> list[Finding]:
        """Ask whether a step begins another training; if so, end all findings and begin anew."""
        shown = (detector.begins_anew(first) for detector in self._detectors)
        anew = next((evidence for evidence in shown if evidence is not None), None)
        if anew is None:
            return []
        earlier = self._latest.values()
        self._latest = {each.id: _of_before(each, first.step) for each in earlier}
        changed = list(self._latest.values())
        self._detectors = _judges_of(self._run)
        self._batches = RecentBatches(self._num_workers)
        self._events = FindingEvents(changed)
        self.num_steps = 0
        self._step = self._begun_at = first.step
        note = self._update(anew)
        return changed if note is None else [*changed, note]

    def _observe(self, reports: Sequence[StepReport]) -> Iterator[list[Finding]]:
        """Run all detectors on each step before the next step."""
        for steps in batches_of(reports, self._batches):
            streams = [detector.observe(steps) for detector in self._detectors]
            for number in steps.numbers:
                self._step = number
                if not self.num_steps:
                    self._begun_at = number
                self.num_steps += 1
                yield self._updates([next(stream) for stream in streams])

    def close(self) -> list[Finding]:
        """End the run; return, once, every finding that has changed since it was last reported."""
        events = self._updates(detector.close() for detector in self._detectors)
        for finding, count in self._events.reported:
            latest = self._latest[finding.id]
            if replace(latest, step=finding.step) != finding:
                self._events.note(latest, count)
                events.append(latest)
        return events

    def _updates(self, found: Iterable[Iterable[FaultEvidence]]) -> list[Finding]:
        return [
            finding
            for evidence in chain.from_iterable(found)
            if (finding := self._update(evidence)) is not None
        ]

    def _update(self, evidence: FaultEvidence) -> Finding | None:
        """Update the finding; return it if it is to be recorded."""
        finding = finding_of(evidence, self._step, begun_at=self._begun_at)
        self._latest[finding.id] = finding
        return None if self._events.of(finding, evidence.count) is None else finding


def _judges_of(run: RunFacts) -> list[Detector]:
    """Return the detectors of a run; later ones may leave out what earlier ones flag."""
    made = (each.at_root("make_judges") for each in EVIDENCE)
    return [judge for make in made if make is not None for judge in make(run)]


def _of_before(finding: Finding, step: int) -> Finding:
    """Return a finding of a training that has ended, as another one begins."""
    if finding.status == "closed" and finding.severity is Severity.NOTE:
        return finding
    return replace(
        finding,
        status="closed",
        severity=Severity.NOTE,
        step=step,
        explanation=f"Of the training before step {step:,}: {finding.explanation}",
        next_check="Nothing: it is of a training that has ended.",
    )


def _at(info: Any, *path: str) -> Any:
    """Return an entry inside entries of ``run.json``; None where there is none."""
    for name in path:
        info = info.get(name) if isinstance(info, Mapping) else None
    return info


def by_rank(info: Mapping[str, Any], name: str) -> list[Any]:
    """Return an entry of ``run.json`` for each rank, None where a rank has none."""
    entries = info.get("ranks")
    entries = entries if isinstance(entries, list) else []
    values = {e.get("rank"): e.get(name) for e in entries if isinstance(e, Mapping)}
    return [values.get(rank) for rank in range(len(values))]


def hosts_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the host of each rank from ``run.json``; empty unless it has them all."""
    hosts = by_rank(info, "host")
    return tuple(map(str, hosts)) if all(hosts) else ()


def comm_hook_of(info: Mapping[str, Any]) -> str:
    """Return the name of the communication hook that reduces, if it is not rankscope's."""
    names = str(_at(info, "training", "reduction", "hook") or "")
    theirs = (name for name in names.split(", ") if not name.startswith("rankscope."))
    return next(theirs, "")


def _declared_of(info: Mapping[str, Any]) -> int:
    declared = _at(info, "training", "declared_micro_batches")
    return declared if isinstance(declared, int) else 0


def _trained_in(info: Mapping[str, Any]) -> int:
    trained = _at(info, "training", "parameters", "trained_tensors")
    return trained if isinstance(trained, int) else 0


def _holds_fewer(info: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of the first rank is known to hold fewer tensors than train."""
    groups = _at(info, "training", "optimizer", "groups")
    if not isinstance(groups, list):
        return False
    counts = [_at(group, "tensors") for group in groups]
    return all(isinstance(one, int) for one in counts) and sum(counts) < _trained_in(info)


def diagnosis_of(run: Run) -> Diagnosis:
    """Return the diagnosis of a run before its first step, with its hosts, facts and plan."""
    info = run.info
    plan = Plan.of(_at(info, "options", "plan"))
    environments = by_rank(info, "environment")
    settings = by_rank(info, "settings")
    reduced_in = _at(info, "options", "reduced_in")
    replaced = by_rank(info, "with_replacement")
    splits = (by_rank(info, "data_splits") or [()])[0] or ()
    lengths = [one for one in by_rank(info, "data_length") if isinstance(one, int)]
    rows = [one for one in by_rank(info, "data_rows") if isinstance(one, int)]
    unsaved = _at(info, "training", "model", "unsaved_buffers")
    return Diagnosis(
        RunFacts(
            run.num_workers,
            hosts_of(info),
            tuple(environments) if all(environments) else (),
            plan,
            reduced_in=reduced_in if isinstance(reduced_in, Mapping) else None,
            comm_hook=comm_hook_of(info),
            sampler_seeds=tuple(by_rank(info, "sampler_seed")),
            with_replacement=bool(replaced) and all(one is True for one in replaced),
            data_splits=[(str(name), int(parts)) for name, parts in splits],
            data_order=str((by_rank(info, "data_order") or [""])[0] or ""),
            other_rows=ranks_of_other_rows(info),
            data_length=plan.samples or max(lengths, default=None),
            data_rows=max(rows, default=None),
            unsaved_buffers=tuple(map(str, unsaved)) if isinstance(unsaved, list) else (),
            world_size=int(info.get("world_size") or 0),
            by_loop=_at(info, "options", "parallel") == "loop",
            declared_micro_batches=_declared_of(info),
            trained=_trained_in(info),
            unheld=_holds_fewer(info),
            settings=settings if all(isinstance(one, Mapping) for one in settings) else (),
            after_complete=info.get("after_complete") is True,
        )
    )


def ranks_of_other_rows(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks whose data sets are known to have other rows than most, or another order.

    All ranks, where most have no rows in common. Ranks may hold other values beside equal rows.
    """
    digests = by_rank(info, "data_digest")
    if digests and all(isinstance(one, int) for one in digests):
        return minority_ranks(digests)
    fields = [set(each) for each in by_rank(info, "data_fields") if isinstance(each, list)]
    if not fields or len(fields) != len(digests) or not all(fields):
        return ()
    field, most = Counter(chain.from_iterable(fields)).most_common(1)[0]
    common = 2 * most > len(fields)
    return tuple(rank for rank, own in enumerate(fields) if not (common and field in own))


def diagnose_run(run: Run) -> tuple[Finding, ...]:
    """Diagnose a recorded run again, from its tables alone; return the findings of its live end."""
    diagnosis = diagnosis_of(run)
    if "continues" in run.info:
        try:
            diagnosis.restore(_state_at_start(run))
        except StateError as error:
            raise RunError(
                f"{run.path} continues a run under other detectors ({error}), those of another "
                "release: that one can diagnose it again; its findings are in findings.jsonl"
            ) from error
    reports = run.iter_reports()
    with ranks_of_job(run.info):
        while together := list(islice(reports, _TOGETHER)):
            diagnosis.observe_many(together)
        diagnosis.close()
    return diagnosis.findings


def _state_at_start(run: Run) -> State:
    """Return the initial state of a run that continues another."""
    file = run.path / START_FILE
    try:
        state = read_state(file)
    except StateError as error:
        raise RunError(f"cannot use {file}: {error}; its findings are in findings.jsonl") from error
    if state is None:
        raise RunError(
            f"{file} is missing: without it, a run that continues another cannot be diagnosed "
            "again; its findings are in findings.jsonl"
        )
    return state


def state_after(
    previous: Path, num_workers: int, hosts: Sequence[str], groups: Sequence[str]
) -> State | None:
    """Return the final state of a run, for a restarted job to begin with.

    The process of the run before may have been killed. None, with a warning, when the detectors
    have to start anew. ``hosts`` and ``groups`` are those of the restarted job.
    """
    try:
        state = _diagnosis_after(previous, num_workers, groups).state()
        restored = unpack_state(pack_state(state))  # as all ranks will
        Diagnosis(RunFacts(num_workers, hosts)).restore(restored)
        return state
    except (StateError, RunError) as error:
        reason = str(error)
    except Exception as error:  # no error here may stop the start of a job
        _log.debug("cannot go on from %s", previous, exc_info=error)
        reason = repr(error)
    _log.warning("the detectors start anew, not from %s: %s", previous, reason)
    return None


def _diagnosis_after(previous: Path, num_workers: int, groups: Sequence[str]) -> Diagnosis:
    run = Run.open(previous)
    if run.num_workers != num_workers:
        raise StateError(f"it had {run.num_workers} workers, this job has {num_workers}")
    if list(run.info.get("options", {}).get("groups", groups)) != list(groups):
        raise StateError("it had other groups of parameters")
    diagnosis = diagnosis_of(run)  # later steps followed that run's plan
    diagnosis.restore(_last_state(previous))
    for report in run.iter_reports(diagnosis.next_step):
        diagnosis.observe(report)
    diagnosis.close()
    return diagnosis


def _last_state(previous: Path) -> State:
    """Return the last state that a run wrote; its initial one if it was killed before."""
    for name in (STATE_FILE, START_FILE):
        try:
            state = read_state(previous / name)
        except StateError as error:
            raise StateError(f"{name} is of no use: {error}") from error
        if state is not None:
            return state
    raise StateError(f"it has no {STATE_FILE}")
