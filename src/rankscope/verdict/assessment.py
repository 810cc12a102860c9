"""The assessment of a run: one verdict in plain words, from the recorded tables and findings."""

import glob
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.detector import BEGUN_ANEW
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.step import as_floats
from rankscope.bus.words import count, name_ranks, ranks_of_job
from rankscope.errors import RunError
from rankscope.evidence import EVIDENCE
from rankscope.files import is_file
from rankscope.record import Coverage, Run
from rankscope.record.begin import FINDINGS_FILE, last_writer, writer_is_elsewhere
from rankscope.record.reader import MAX_STEPS
from rankscope.record.rollups import read_coverage
from rankscope.record.states import START_FILE, read_number
from rankscope.record.tables import step_range
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.spread import finite_mean
from rankscope.verdict.coverage import checks_of, coverage_of
from rankscope.verdict.dispersion import Values, dispersion_numbers, noise_numbers
from rankscope.verdict.endings import read_endings
from rankscope.verdict.rules import (
    faults_in_words,
    first_sentence,
    next_check_of,
    ranked,
    settled_by,
)
from rankscope.verdict.verdicts import RunProgress, Verdict, describe_end, judge, statements


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another run of the same job."""

    path: Path
    ranks: str  # its workers' ranks in the job, in words
    status: str  # see ``rankscope.record.Run.status``
    findings: tuple[Finding, ...]  # its findings, the worst first

    @property
    def worst(self) -> Finding | None:
        """Its worst finding beyond notes."""
        faults = (one for one in self.findings if one.severity > Severity.NOTE)
        return next(faults, None)

    @property
    def sentence(self) -> str:
        """Its worst finding, and the ranks of the job that it compares; empty without one."""
        worst = self.worst
        if worst is None:
            return ""
        return f"Among {self.ranks} of this job: {first_sentence(worst, self.findings)}"


def coordinate_of(info: Any) -> str:
    """Return a run's place among those of its job, in words; empty if the job has no other."""
    job = info.get("job")
    return name_ranks(job["ranks"], of_job=True) if job else ""


def siblings_of(run: Run) -> list[Sibling]:
    """Return the other runs of the same attempt of a run's job, in order of their names.

    They lie beside it, and have names with the same beginning and the same number at the end. One
    that cannot be read is left out.
    """
    job = run.info.get("job")
    if not job:
        return []
    found = []
    for path in sorted(run.path.parent.glob(f"{glob.escape(job['base'])}*")):
        if path.name == run.path.name or not Run.is_run(path):
            continue
        try:
            other = Run.open(path)
            theirs = other.info.get("job") or {}
            if theirs.get("id") == job["id"] and _number(other) == _number(run):
                found.append(
                    Sibling(
                        path,
                        coordinate_of(other.info),
                        other.status,
                        tuple(ranked(other.findings())),
                    )
                )
        except RunError:
            continue
    return found


def worst_of(siblings: Iterable[Sibling]) -> Sibling | None:
    """Return the sibling with the worst finding beyond notes."""
    faulty = [one for one in siblings if one.worst is not None]
    return max(faulty, key=lambda one: one.findings[0].severity, default=None)


def describe_siblings(siblings: Iterable[Sibling], info: Mapping[str, Any]) -> str:
    """Return the verdicts of a run's siblings, and its own ranks, in words; empty without any."""
    parts = [f"{one.path.name} ({one.ranks}): {_in_words(one)}" for one in siblings]
    if not parts:
        return ""
    return (
        f"This job has {count(len(parts), 'other run')}: {'; '.join(parts)}. This one's workers, "
        f"which figures and tables number from 0, are {coordinate_of(info)} of the job."
    )


def _in_words(sibling: Sibling) -> str:
    return faults_in_words(sibling.findings) or coverage_of(Run.open(sibling.path)).verdict


def _number(run: Run) -> str:
    """Return what distinguishes the directory of a later attempt."""
    return run.path.name.removeprefix(str(run.info["job"]["name"]))


_MEANS = (
    "loss_std",
    "loss_range",
    "grad_norm_std",
    "cosine_mean",
    "cosine_weighted",
    "loss_std_expected",
)
_ENDS = 5
_MOST_BATCHES = 2048  # local batches that are read for repeats between workers
MAX_SAMPLES = 2**23  # most samples that are counted exactly: 64 MB of ids

LEFT_SECONDS = 3600.0  # without a step, until a run elsewhere is taken for interrupted

MAX_COSTS = 2**16  # rows for the median cost of a step


@dataclass(frozen=True, slots=True)
class Assessment:
    """The verdict on a run, and what to change.

    Attributes:
        severity: The worst severity of a finding; None when the run is healthy.
        headline: The verdict in one sentence; another one where the record ends early.
        statements: What the metrics show and what they cannot, one sentence or two each.
        recommendation: What to change.
        values: The numbers behind it; None where a number is undefined. Means are over steps.
        early: Whether some check needs more steps than the run has.
        command: The next command to run; empty without one.
        ending: How a record that ends early ended; empty for any other.
    """

    severity: Severity | None
    headline: str
    statements: tuple[str, ...]
    recommendation: str
    values: Mapping[str, float | int | None]
    early: bool = False
    command: str = ""
    ending: str = ""

    @property
    def word(self) -> str:
        """``healthy``, ``early``, ``note``, ``warning`` or ``error``."""
        return str(self.severity or ("early" if self.early else "healthy"))


def assess(run: Run) -> Assessment:
    """Assess a recorded run, finished or not.

    Dispersion is compared in words with that of sampling alone. Only findings, exact equality of
    all workers, a record that ends early, and too few measurements set a severity.
    """
    with ranks_of_job(run.info):
        return _assess(run)


def _assess(run: Run) -> Assessment:
    values = measure(run)
    findings = run.findings()
    progress = progress_of(run)
    known = values["samples_drawn"] is not None
    options = run.info.get("options")
    run_on_all_B = np.isfinite(run.overview("canary_loss").mean_BW).all(axis=1)
    canaries = bool(run_on_all_B.any())
    unmeasured = run.info.get("unmeasured")
    checks = checks_of(
        run.num_workers, options, samples=known, canaries=canaries, unmeasured=unmeasured
    )
    why = unmeasured.get("canary", "") if isinstance(unmeasured, Mapping) and not canaries else ""
    progress = replace(progress, checks=checks, coverage=coverage_of(run), no_canary=str(why))
    siblings = siblings_of(run)
    verdict: Verdict = _of_job(judge(values, findings, progress), findings, worst_of(siblings))
    severities = [verdict.severity, *(finding.severity for finding in findings)]
    return Assessment(
        severity=max(filter(None, severities), default=None),
        headline=verdict.headline,
        statements=(
            *filter(None, [describe_siblings(siblings, run.info)]),
            *statements(values, findings, progress),
            *_describe_missing(run),
            *_describe_long(run),
        ),
        recommendation=verdict.recommendation,
        values=values,
        early=verdict.early,
        command="" if verdict.about is None else _next_command(run, verdict.about),
        ending=describe_end(progress) if values["steps"] and progress.cut_short else "",
    )


def _of_job(verdict: Verdict, findings: Sequence[Finding], worst: Sibling | None) -> Verdict:
    """Return the verdict of the job's worst run, if it is not this one.

    Of two that are as bad, the advice begins with the other one's fault if that began before.
    """
    if worst is None or worst.worst is None:
        return verdict
    fault = worst.worst
    seen = f"See rankscope report {shlex.quote(str(worst.path.absolute()))}."
    own = max((one.severity for one in findings), default=Severity.NOTE)
    if own > fault.severity:
        return verdict
    if own == fault.severity:
        if verdict.about is None or verdict.about.first_step <= fault.first_step:
            return verdict
        return replace(verdict, recommendation=f"{worst.sentence} {seen} {verdict.recommendation}")
    advice = f"{next_check_of(fault, worst.findings)} {seen}"
    return Verdict(worst.sentence, advice, fault.severity)


def _next_command(run: Run, finding: Finding) -> str:
    """Return the command that shows more of a finding; empty where there is none."""
    answer = settled_by(finding, run.findings()) or finding
    made = (each.at_root("next_command") for each in EVIDENCE)
    commands = (make(run.path, finding, answer) for make in made if make is not None)
    return next(filter(None, commands), "")


def progress_of(run: Run) -> RunProgress:
    """Return the progress of a recorded run."""
    steps = step_range(run.path, Table.STEPS)
    continues = "continues" in run.info and all(f.id != BEGUN_ANEW for f in run.findings())
    agent = run.info.get("agent")
    unwritten = run.info.get("unwritten")
    return RunProgress(
        "interrupted" if _is_left(run) else run.status,
        -1 if steps is None else steps[1],
        read_number(run.path / START_FILE, "num_steps") if continues else 0,
        endings=read_endings(run.info),
        agent_ended=str(agent.get("ended") or "") if isinstance(agent, Mapping) else "",
        unwritten="" if unwritten is None else _why_unwritten(unwritten),
        lost=_lost_parts(run),
        written_by=last_writer(run.path, run.info),
    )


def _is_left(run: Run) -> bool:
    """Return whether a run that another machine writes has had no step for an hour."""
    if run.status != "running" or not writer_is_elsewhere(run.path):
        return False
    times = run.latest(Table.STEPS, "time", max_rows=1)["time"]
    return bool(len(times)) and time.time() - float(times[-1]) > LEFT_SECONDS


def _lost_parts(run: Run) -> tuple[str, ...]:
    """Return the parts that a run's directory should have, and has not."""
    tables = (Table.STEPS, Table.WORKERS)
    missing = [f"{table}/" for table in tables if step_range(run.path, table) is None]
    lost = missing if len(missing) < len(tables) else []
    if len(run.findings()) < (run.info.get("findings") or 0):
        whole = "whole " if is_file(run.path / FINDINGS_FILE) else ""
        lost.append(f"{whole}{FINDINGS_FILE}")
    return tuple(lost)


def measure(run: Run) -> Values:
    """Compute the numbers of an assessment by name, from the recorded tables."""
    names = ("loss_mean", "samples_drawn", "samples_distinct", *_MEANS)
    columns = run.steps(*names)
    drawn, distinct = (as_floats(columns[name]) for name in names[1:3])
    losses = columns["loss_mean"]
    measured = losses[np.isfinite(losses)]
    ends = 2 * _ENDS if "," in _optimizer_class(run) else _ENDS  # whose losses may alternate
    if run.num_workers == 1:  # nothing to be apart from
        columns |= {name: np.full(len(losses), math.nan) for name in _MEANS}
    return {
        "num_workers": run.num_workers,
        "steps": run.num_rows(Table.STEPS),
        **{name: _defined(finite_mean(columns[name])) for name in _MEANS},
        **dispersion_numbers(columns["loss_std"], columns["loss_std_expected"]),
        **noise_numbers(run),
        **_samples(run, round(_total(run, drawn))),
        "effective_batch": _defined(finite_mean(distinct)),
        "global_batch": _defined(finite_mean(drawn)),
        "repeats_between": _repeats_between(run),
        **_cost(run),
        "loss_first": _defined(finite_mean(measured[:ends])),
        "loss_last": _defined(finite_mean(measured[-ends:])),
        "loss_ends": ends,
        "loss_per_token": _has_tokens(run),
    }


def _optimizer_class(run: Run) -> str:
    """Return the class of a run's optimizer, or of all of them; empty where it is not known."""
    found: Any = run.info.get("training")
    for key in ("optimizer", "class"):
        found = found.get(key) if isinstance(found, dict) else None
    return str(found or "")


def _total(run: Run, values_T: Floats) -> float:
    """Estimate the sum over all steps from those that were read."""
    known_T = values_T[np.isfinite(values_T)]
    return float(known_T.sum()) * run.num_rows(Table.STEPS) / max(len(values_T), 1)


def _has_tokens(run: Run) -> bool:
    """Return whether label tokens were counted: their numbers differ from those of samples."""
    seen = run.overviews("loss_weight", "num_samples")
    weights_BW = seen["loss_weight"].mean_BW
    samples_BW = seen["num_samples"].mean_BW
    return bool((np.isfinite(weights_BW) & (weights_BW != samples_BW)).any())


def _cost(run: Run) -> Values:
    """Return the monitor's share of the training's time, and the widest sampling interval."""
    columns = run.steps("step", "overhead_seconds", "interval")
    longest = _longest_seconds(run, columns["step"])
    overheads = columns["overhead_seconds"][1:]
    intervals = as_floats(columns["interval"])
    known = np.isfinite(overheads) & (longest[1:] > 0) if len(overheads) else overheads > 0
    time = float(np.sum(longest[1:][known] - overheads[known]))
    widest = np.nanmax(intervals) if np.isfinite(intervals).any() else math.nan
    return {
        "overhead_share": _defined(
            float(np.sum(overheads[known])) / time if time > 0 else math.nan
        ),
        "interval": _defined(float(widest)),
        **_cost_of_a_step(run),
    }


def _cost_of_a_step(run: Run) -> Values:
    """Return the slowest worker's median seconds in every step, and for reading gradients."""
    rows = run.sampled(
        Table.WORKERS, "rank", "overhead_seconds", "read_seconds", max_rows=MAX_COSTS
    )
    reads_R = rows["read_seconds"]
    costs_R = rows["overhead_seconds"]
    known_R = np.isfinite(reads_R) & np.isfinite(costs_R)
    fixed = []
    read = []
    for rank in np.unique(rows["rank"][known_R]):
        own_R = known_R & (rows["rank"] == rank)
        fixed.append(np.median(costs_R[own_R] - reads_R[own_R]))
        read.append(np.median(reads_R[own_R & (reads_R > 0)]) if reads_R[own_R].any() else 0.0)
    return {
        "overhead_fixed_seconds": _defined(float(max(fixed, default=math.nan))),
        "overhead_read_seconds": _defined(float(max(read, default=math.nan))),
        "overhead_budget": _budget(run),
    }


def _budget(run: Run) -> float | None:
    """Return the budget of the overhead if it was exceeded."""
    overhead = run.info.get("overhead")
    if not isinstance(overhead, dict) or overhead.get("within_budget") is not False:
        return None
    budget = overhead.get("budget")
    return float(budget) if isinstance(budget, int | float) else None


def _longest_seconds(run: Run, steps_T: Ints) -> Floats:
    """Return the slowest worker's time of each step; in a long run, that of its bin of steps."""
    if not run.is_long:
        known_R, seconds_RW = run.per_worker("step_seconds")
        longest_T = np.zeros(len(steps_T))  # a growing run may have new steps
        _, at_T, at_R = np.intersect1d(steps_T, known_R, return_indices=True)
        longest_T[at_T] = _largest(seconds_RW)[at_R]
        return longest_T
    seconds = run.overview("step_seconds")
    longest_B = _largest(seconds.mean_BW)
    at_T = np.searchsorted(seconds.first_B, steps_T, side="right") - 1
    return longest_B[np.clip(at_T, 0, None)]


def _largest(values_TW: Floats) -> Floats:
    largest_T: Floats = np.max(values_TW, axis=1, initial=0.0, where=np.isfinite(values_TW))
    return largest_T


def _repeats_between(run: Run) -> int | None:
    """Count the samples that several workers drew in the same step, in the latest steps."""
    rows = run.latest(Table.SAMPLES, "step", "samples", max_rows=_MOST_BATCHES)
    batches = list(map(np.unique, rows["samples"]))
    if not batches:
        return None
    own_B = np.repeat(rows["step"], list(map(len, batches)))
    pairs = np.stack([own_B, np.concatenate(batches)])
    return int(pairs.shape[1] - np.unique(pairs, axis=1).shape[1])


def _samples(run: Run, drawn: int) -> Values:
    """Count the samples of the whole run, and the different ones."""
    coverage = read_coverage(run.path) if drawn > MAX_SAMPLES else None
    if coverage is not None:
        return _estimated_samples(run, coverage, drawn)
    if run.num_samples > MAX_SAMPLES:
        counted = run.count_samples()
        number = int(counted.drawn_B[-1])
        distinct = int(counted.distinct_B[-1])
    else:
        samples = np.sort(run.sample_ids())
        number = len(samples)
        distinct = int(np.count_nonzero(np.diff(samples))) + 1 if number else 0
    return {
        "distinct_samples": distinct or None,
        "samples_drawn": drawn or None,
        "samples_exact": number == drawn,
    }


def _estimated_samples(run: Run, coverage: Coverage, drawn: int) -> Values:
    """Estimate the same from roll-ups, for a run with too many samples."""
    columns = run.steps("step", "samples_drawn")
    counted_T = as_floats(columns["samples_drawn"])[columns["step"] <= coverage.step_B[-1]]
    share = int(coverage.distinct_B[-1]) / int(coverage.drawn_B[-1])
    return {
        "distinct_samples": round(share * drawn),
        "samples_drawn": drawn or None,
        "samples_exact": len(columns["step"]) < run.num_rows(Table.STEPS)
        or int(np.nansum(counted_T)) == int(coverage.drawn_B[-1]),
    }


def _why_unwritten(unwritten: Mapping[str, Any]) -> str:
    why = unwritten.get("why")
    return f"its directory could not be written {f'({why})' if why else 'for too long'}"


def _describe_missing(run: Run) -> tuple[str, ...]:
    """Describe the recorded gaps of a run, and their ranks."""
    sentences = []
    lost = run.info.get("lost_steps")
    unwritten = run.info.get("unwritten")
    if lost:
        ranks = [int(rank) for rank in run.info.get("lost_of", {})]
        whose = name_ranks(ranks) if ranks else "a worker"
        sentences.append(
            f"{count(len(lost), 'step')} of this run {'is' if len(lost) == 1 else 'are'} not on "
            f"record: what {whose} measured was lost between hosts."
        )
    if unwritten:
        sentences.append(
            f"The record ends before step {unwritten['first_step']:,}, and lacks "
            f"{count(unwritten['steps'], 'step')}: {_why_unwritten(unwritten)}."
        )
    for rank, steps in run.info.get("without_room", {}).items():
        sentences.append(
            f"The gradient of {name_ranks([int(rank)])} was left out in {count(steps, 'step')}, "
            "which count as not observed: the monitor's agent did not keep up."
        )
    return tuple(sentences)


def _describe_long(run: Run) -> tuple[str, ...]:
    sentences = []
    if run.num_rows(Table.STEPS) > MAX_STEPS:
        sentences.append(
            f"Of the {run.num_rows(Table.STEPS):,} steps of this run, up to {MAX_STEPS:,} were "
            "read, evenly chosen: means and sums over steps are estimates."
        )
    if run.is_long:
        sentences.append(
            "This run is too long to read every row again: the time that watching took, the number "
            "of different samples and the values of micro-batches are estimates, from roll-ups and "
            "from evenly chosen steps."
        )
    elif run.num_samples > MAX_SAMPLES:
        sentences.append(
            "This run drew too many samples to count each again: the number of different ones is "
            "an estimate, with an error of about 0.5 %."
        )
    return tuple(sentences)


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None
