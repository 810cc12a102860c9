"""The words of an assessment: headline, recommendation and statements.

Dispersion is only compared with its null. A ratio far from 1 is a reason to look, never a finding:
certainty comes from findings, and from exact equality.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rankscope.bus.detector import Check
from rankscope.bus.finding import OFTEN, TIMES_LATELY, Finding, Severity
from rankscope.bus.words import all_workers, count, listed, name_ranks
from rankscope.stats.bets import bound_in_words
from rankscope.verdict.coverage import MeasuredParts, describe_checks, missing_steps
from rankscope.verdict.dispersion import (
    Values,
    describe_dispersion,
    describe_noise_scale,
    short,
    short_pair,
    spread_in_words,
)
from rankscope.verdict.endings import NOT_KNOWN, Endings
from rankscope.verdict.rules import first_sentence, is_harmless, next_check_of, ranked

NOTHING_TO_CHANGE = "Nothing to change."
TOO_EARLY = ("Too early to judge", "Too short to judge")
"""Beginning of the headline of a run of too few steps, by whether it has ended."""
_ALIKE_LOSS = 1e-6
_ALIKE_COSINE = 0.999
_FEW_STEPS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run, in words."""

    headline: str  # what is wrong, or that nothing is
    recommendation: str  # what to do
    severity: Severity | None = None  # the severity, where no finding has one
    early: bool = False  # whether some check needs more steps
    about: Finding | None = None  # the finding behind it, if any


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    status: str = "running"  # ``running``, ``complete``, ``incomplete`` or ``interrupted``
    last_step: int = -1  # the last step on record; -1 without any
    # number of steps of the runs that it continues, from the detectors' state; None if unknown
    earlier_steps: int | None = 0
    checks: tuple[Check, ...] = ()  # the checks of the run
    coverage: MeasuredParts | None = None  # what was measured; None if unknown
    endings: Endings = NOT_KNOWN  # how its ranks ended
    agent_ended: str = ""  # how the process that writes the run ended, if before the run did
    unwritten: str = ""  # why the last steps could not be written, if so
    lost: tuple[str, ...] = ()  # parts of the directory that are missing
    written_by: int | None = None  # the process that still writes it, after its ranks have ended
    no_canary: str = ""  # why no canary has run; empty if one has, or where it is not known

    @property
    def ended(self) -> bool:
        """Whether no more steps will come."""
        return self.status != "running"

    @property
    def cut_short(self) -> bool:
        """Whether the record has steps and ends before it should."""
        return self.status in ("incomplete", "interrupted") and self.last_step >= 0


_BEGUN = RunProgress()


def judge(values: Values, findings: Sequence[Finding], progress: RunProgress = _BEGUN) -> Verdict:
    """Return the verdict: that of the worst finding, or else of the numbers.

    A run whose record ends early is not called healthy, nor one of which too little was measured.
    """
    if not values["steps"]:
        return without_steps(progress)
    verdict = _judge(values, findings, progress)
    faults = _causes(findings)
    coverage = progress.coverage
    if coverage is not None and not faults - {"time.straggler"}:
        verdict = _as_measured(verdict, coverage)
    if faults:
        return _without_canary(verdict, progress)
    if progress.lost and progress.ended and not progress.unwritten:
        return without_parts(progress)
    if progress.cut_short:
        return _cut_short(verdict, progress)
    missing = missing_steps(progress.checks, _steps(values, progress))
    if not verdict.severity and missing:
        verdict = _too_early(verdict, values, progress, missing)
    noted = next(filter(_depends, findings), None)
    if verdict.recommendation == NOTHING_TO_CHANGE and noted is not None:
        return replace(verdict, recommendation=noted.next_check)
    return verdict


_CANARIES_EXPLAIN = ("data.worker_outlier", "compute.worker_outlier", "inconclusive")


def _without_canary(verdict: Verdict, progress: RunProgress) -> Verdict:
    """Return a verdict that says why no canary has tried to explain its finding."""
    about = verdict.about
    if not progress.no_canary or about is None or about.cause not in _CANARIES_EXPLAIN:
        return verdict
    why = f"No canary has run: {progress.no_canary}."
    return replace(verdict, recommendation=f"{verdict.recommendation} {why}")


def _steps(values: Values, progress: RunProgress) -> int:
    return _number(values, "steps") + (progress.earlier_steps or 0)


def _judge(values: Values, findings: Sequence[Finding], progress: RunProgress) -> Verdict:
    """Return the verdict, without single gross values: data alone may cause one.

    Repeated ones on one worker (``gross-outliers``) count, since chance is ruled out, and so do
    three in 50 steps. Harmless notes leave a run healthy.
    """
    shown = [f for f in findings if not (is_harmless(f) or _is_single(f))]
    if not shown:
        return _without_findings(values, progress)
    worst = ranked(shown)[0]
    if worst.id in _BY_CAUSE:
        return replace(_BY_CAUSE[worst.id](values, worst), about=worst)
    return Verdict(first_sentence(worst, findings), next_check_of(worst, findings), about=worst)


def _depends(finding: Finding) -> bool:
    """Return whether a harmless note describes what may not be meant."""
    unsure = finding.id in ("rng.identical", "loss.token_weighting")
    return unsure and finding.severity is Severity.NOTE and finding.status == "open"


def _is_single(finding: Finding) -> bool:
    often = finding.evidence.get(TIMES_LATELY, 0) >= OFTEN
    return finding.id == "gross-outlier" or (finding.id == "gross-value" and not often)


def statements(
    values: Values, findings: Sequence[Finding], progress: RunProgress = _BEGUN
) -> tuple[str, ...]:
    """Return what the metrics and the samples show, and what they cannot show."""
    if not values["steps"]:
        return ()
    causes = _causes(findings)
    coverage = progress.coverage
    enough = coverage is None or coverage.enough
    parts = (
        describe_end(progress) if progress.cut_short and causes else "",
        progress.endings.describe() if progress.cut_short else "",
        _describe_coverage(coverage),
        _describe_loss(values, coverage),
        _describe_metrics(values),
        describe_dispersion(values),
        describe_noise_scale(values, causes),
        _describe_samples(values, causes),
        _describe_limits(values, causes),
        *(_describe_chance(values, findings, progress) if enough and not progress.lost else ()),
        _describe_cost(values),
    )
    return tuple(part for part in parts if part)


def _causes(findings: Sequence[Finding]) -> set[str]:
    """Return the causes of all findings but notes."""
    return {finding.cause for finding in findings if finding.severity > Severity.NOTE}


# Headlines ---------------------------------------------------------------------------------


_OFTEN_SKIPPED = 8  # steps, and one in twenty


def _nonfinite(values: Values, finding: Finding) -> Verdict:
    ranks = name_ranks(finding.ranks)
    if finding.severity is Severity.NOTE:
        skipped = _number(finding, "steps")
        apart = finding.last_step - finding.first_step >= 3 * skipped  # not a scaler's first tries
        if skipped >= _OFTEN_SKIPPED and apart and 20 * skipped >= _number(values, "steps"):
            return Verdict(
                f"The optimizer skipped {count(skipped, 'step')} of {values['steps']:,}: the "
                f"gradient of {ranks} overflowed.",
                f"Look at what {ranks} computes in these steps: a gradient scaler skips a step now "
                "and then, and its scale grows back slowly.",
            )
        return Verdict(
            f"No fault found; the optimizer skipped {count(_number(finding, 'steps'), 'step')} "
            "whose gradient overflowed.",
            NOTHING_TO_CHANGE,
        )
    return Verdict(
        f"{ranks.capitalize()} produced infinities or NaN, first at step {finding.first_step}.",
        finding.next_check,
    )


def _duplicates(values: Values, finding: Finding) -> Verdict:
    if finding.severity is Severity.WARNING:
        return Verdict(first_sentence(finding), finding.next_check)
    num_workers = _number(values, "num_workers")
    useful = _number(finding, "workers_with_own_batches")
    whole = len(finding.ranks) == num_workers
    who = (all_workers(num_workers) if whole else name_ranks(finding.ranks)).capitalize()
    work = f"{useful} workers, not {num_workers}" if useful > 1 else "one worker"
    return Verdict(
        f"{who} train on the same batches: the job does the work of {work}.",
        "Give every worker its own shard: a DistributedSampler with the same seed and the "
        "worker's own rank in each data loader.",
    )


def _again(finding: Finding) -> str:
    """Return whose samples were drawn again, in words."""
    others = _number(finding, "drawn_from_others") + _number(finding, "shared_inside_steps")
    own = _number(finding, "drawn_from_own")
    return f"{count(others, 'draw')} of another worker's, and {own:,} of the same worker's"


def _overlap(values: Values, finding: Finding) -> Verdict:
    if finding.severity is Severity.NOTE:
        return Verdict(
            f"Workers draw samples again within an epoch: {_again(finding)}.",
            "Nothing to change if that is intended. Otherwise: split and shuffle the data with the "
            "same seeds on all ranks, so that their shards are disjoint.",
        )
    adverb = "" if finding.severity is Severity.ERROR else "probably "
    if len(finding.ranks) == 1:
        rank = finding.ranks[0]
        who = (
            f"{name_ranks([rank]).capitalize()} {adverb}draws samples that belong to other workers"
        )
    else:
        who = f"The workers' shards {adverb}overlap"
    draws = _number(finding, "drawn_from_others") + _number(finding, "shared_inside_steps")
    drawn = values["samples_drawn"]
    of_all = f" of {drawn:,}" if drawn else ""
    return Verdict(
        f"{who}: {count(draws, 'draw')}{of_all} repeated a sample of another worker.",
        finding.next_check,
    )


_NOTHING_YET = Verdict(
    "Nothing is recorded yet.",
    "Let the run take its first steps, and its agent write them.",
    Severity.NOTE,
)
_NOTHING_RECORDED = Verdict(
    "Nothing was recorded: the run ended before its first step had.",
    "Let it take a few steps. A step ends with a backward pass that synchronises gradients, so not "
    "inside no_sync, of the model that watch() got; see the log for the monitor's warnings.",
    Severity.WARNING,
)
_RESTORE = (
    "Restore it from where the run was copied or cleaned up. Where findings.jsonl alone is "
    "missing, rankscope report --again finds most of them in the tables."
)
_INTERRUPTED_BEFORE = Verdict(
    "Nothing was recorded: the training was interrupted before its first step had ended.",
    "See the training's own output for the reason, and start it again.",
    Severity.WARNING,
)


_MAKE_ROOM = "Make room there, or let run_dir name another place; the training itself went on."


def without_parts(progress: RunProgress) -> Verdict:
    """Return the verdict on a run of which parts are missing, and nothing else is known."""
    headline = f"A part of this run is missing: its directory has no {listed(progress.lost)}."
    return Verdict(headline, _RESTORE, Severity.WARNING)


def without_steps(progress: RunProgress) -> Verdict:
    """Return the verdict on a run that has no step on record."""
    if not progress.ended:
        if progress.written_by is None:
            return _NOTHING_YET
        return replace(
            _NOTHING_YET,
            headline="Nothing is recorded yet: the training has ended, and its agent (process "
            f"{progress.written_by}) still writes the record.",
            recommendation="Ask again in a moment.",
        )
    if progress.lost:
        return without_parts(progress)
    if progress.unwritten:
        return Verdict(f"Nothing was recorded: {progress.unwritten}.", _MAKE_ROOM, Severity.WARNING)
    if progress.status in ("incomplete", "interrupted") and not progress.agent_ended:
        how = f" {progress.endings.headline}" if progress.endings.headline else ""
        return replace(_INTERRUPTED_BEFORE, headline=f"{_INTERRUPTED_BEFORE.headline}{how}")
    if not progress.agent_ended:
        return _NOTHING_RECORDED
    return Verdict(
        f"Nothing was recorded: the process that writes the run {progress.agent_ended} before it "
        "had written a step.",
        "Give it more memory if it has little. RANKSCOPE_AGENT_LOG=FILE names a file for its "
        "error; see the training's log for the monitor's warnings.",
        Severity.WARNING,
    )


_LET_IT_SEE = (
    "Watch the wrapped model that the optimizer updates, and call that one, as model(batch), with "
    "loss.backward() after it and zero_grad() not in between; call scope.resume() after "
    "scope.pause(), on all ranks; see the log for the monitor's warnings."
)
_WATCH_ALL = (
    "Call watch() once all parameters are unfrozen and in the optimizer; where they join later, "
    "close the scope and call watch() again then. Give a second model a wrapper of its own: "
    "without one, each worker trains a copy that drifts apart, unless the loop reduces its "
    "gradients."
)
_GIVE_LOSS = (
    "Where the training's own code computes the loss, call scope.loss(loss) before loss.backward()."
)
_GIVE_BATCH = (
    "To compare the workers' samples, call scope.batch(ids) before each batch's forward pass."
)
_BY_CAUSE: Mapping[str, Callable[[Values, Finding], Verdict]] = {
    "numerics.nonfinite": _nonfinite,
    "data.duplicate_batches": _duplicates,
    "data.overlapping_shards": _overlap,
}


def _as_measured(verdict: Verdict, coverage: MeasuredParts) -> Verdict:
    """Return a verdict without a fault, limited to what was measured."""
    if not coverage.enough:
        said = coverage.verdict
        advice = _LET_IT_SEE if coverage.joined_by is None else _WATCH_ALL
        return Verdict(f"{said[0].upper()}{said[1:]}.", advice, coverage.severity)
    if not coverage.limits or (verdict.about is not None and coverage.joined_by is None):
        return verdict
    limits = f"{coverage.limits[0].upper()}{coverage.limits[1:]}."
    return replace(
        verdict,
        headline=f"{verdict.headline} {limits}",
        recommendation=_with_advice(verdict, coverage),
        severity=verdict.severity or coverage.severity,
    )


def _with_advice(verdict: Verdict, coverage: MeasuredParts) -> str:
    own = "" if verdict.recommendation == NOTHING_TO_CHANGE else verdict.recommendation
    watch = _WATCH_ALL if coverage.leaves_models_out else ""
    loss = "" if coverage.has_losses else _GIVE_LOSS
    batch = "" if coverage.identified else _GIVE_BATCH
    return " ".join(filter(None, [own, watch, loss, batch])) or NOTHING_TO_CHANGE


def _cut_short(verdict: Verdict, progress: RunProgress) -> Verdict:
    """Return the verdict on a record that ends early: its end first, without a note's advice."""
    has_own = verdict.about is None and verdict.recommendation != NOTHING_TO_CHANGE
    own = f" {verdict.recommendation}" if has_own else ""
    return replace(
        verdict,
        headline=f"{describe_end(progress)} {verdict.headline}",
        recommendation=f"{_why_it_ended(progress)}{own}",
        severity=verdict.severity or Severity.NOTE,
        early=False,
    )


def _too_early(verdict: Verdict, values: Values, progress: RunProgress, missing: int) -> Verdict:
    """Extend a verdict for a run in which some checks need more steps."""
    headline = verdict.headline
    recommendation = verdict.recommendation
    steps = count(_steps(values, progress), "step")
    more = count(missing, "more step")
    if headline.startswith("Healthy"):
        headline = f"{TOO_EARLY[progress.ended]}: no fault found in {steps}."
        if progress.coverage is not None and progress.coverage.limits:
            headline = f"{headline[:-1]}, but {progress.coverage.limits}."
    if recommendation == NOTHING_TO_CHANGE:
        verb = "Train" if progress.ended else "Run"
        recommendation = f"{verb} {more} to complete all checks."
    return replace(verdict, headline=headline, recommendation=recommendation, early=True)


def _why_it_ended(progress: RunProgress) -> str:
    """Return where to see why the record ends early."""
    if progress.unwritten:
        return _MAKE_ROOM
    if progress.endings.headline:
        return progress.endings.where_to_look
    return "See the log for the end of the training, or of the monitor before it."


def describe_end(progress: RunProgress) -> str:
    """Return how a record that ends early ended."""
    early = f"The record ends early, with step {progress.last_step:,}"
    if progress.unwritten:
        return f"{early}: {progress.unwritten}."
    if progress.endings.headline:
        return f"{early}. {progress.endings.headline}"
    return f"{early}: the training stopped there, or went on without being recorded."


def _without_findings(values: Values, progress: RunProgress) -> Verdict:
    partial = progress.coverage is not None and progress.coverage.updated
    healthy = "No fault found" if progress.cut_short or partial else "Healthy"
    num_workers = values["num_workers"]
    if num_workers == 1:
        return Verdict("One worker: there is nothing to compare it with.", NOTHING_TO_CHANGE)
    if values["samples_drawn"] is None or values["effective_batch"] is None:
        return _without_samples(values)
    who = f"the {num_workers} workers train on different samples"
    spread = spread_in_words(values)
    if values["effective_batch"] != values["global_batch"]:
        if values["repeats_between"] == 0:
            return Verdict(
                f"No fault found: {who}; of {short(values['global_batch'])} in a global batch, "
                f"{short(values['effective_batch'])} differ on average, and the others are repeats "
                "inside of a worker's own batch.",
                "Nothing to change if equal samples are meant, or are left by cutting them short.",
            )
        return Verdict(
            f"No fault proven: a global batch of {short(values['global_batch'])} samples holds "
            f"{short(values['effective_batch'])} different ones on average.",
            "Nothing to change if that is the padding at the end of an epoch.",
        )
    if spread is None:
        return Verdict(f"{healthy}: {who}.", NOTHING_TO_CHANGE)
    if spread == "about":
        return Verdict(
            f"{healthy}: {who}, and disagree about as much as sampling alone explains.",
            NOTHING_TO_CHANGE,
        )
    if spread == "closer":
        return Verdict(
            f"No fault found: {who}, and their losses lie closer than parts of their batches do.",
            "Nothing to change where micro-batches split a group, as completions of one prompt.",
        )
    return Verdict(
        f"No fault found: {who}, but their losses lie {spread} apart than sampling alone explains.",
        "Compare what kind of data the workers draw; nothing else here asks for a change.",
    )


def _without_samples(values: Values) -> Verdict:
    if _all_alike(values):
        return Verdict(
            "All workers compute the same losses and gradients: they train on the same data.",
            "Give every worker its own shard, and name the samples with scope.batch(ids).",
            Severity.WARNING,
        )
    return Verdict(
        "No fault found, but the samples are unknown: overlapping shards would not show.",
        "Name the samples with scope.batch(ids), so that repeated ones can be seen.",
    )


# Statements --------------------------------------------------------------------------------


def _describe_coverage(coverage: MeasuredParts | None) -> str:
    """Describe what was measured in fewer steps than it should have been."""
    if coverage is None:
        return ""
    parts = [
        f"{what} in {known:,} of the {count(whole, 'step')} {which}"
        for what, known, whole, which in (
            ("gradients", coverage.gradients, coverage.due, "in which they were due"),
            ("a loss", coverage.losses, coverage.steps, "on record"),
        )
        if known < whole
    ]
    if coverage.updated:
        trained = "that the optimizer updates" if coverage.joined_by is None else "that are trained"
        parts.append(
            f"{coverage.watched:,} of the {coverage.updated:,} tensors {trained}{coverage.left_out}"
        )
    return f"Measured: {'; '.join(parts)}." if parts else ""


def _describe_loss(values: Values, coverage: MeasuredParts | None) -> str:
    first = values["loss_first"]
    last = values["loss_last"]
    if first is None or last is None:
        return "No loss was measured, so the workers' losses were not compared."
    began, ended = short_pair(first, last)
    if coverage is not None and not coverage.has_losses:
        known = f"{coverage.losses:,} of {count(coverage.steps, 'step')}"
        return f"The averaged loss is known, and finite, in {known}: {began}, and {ended} at last."
    return (
        f"The averaged loss went from {began} to {ended} over "
        f"{count(int(_number(values, 'steps')), 'step')}. It would look as smooth whether the "
        "workers agree or not."
    )


def _describe_metrics(values: Values) -> str:
    if values["num_workers"] == 1:
        return "Dispersion and direction compare workers, so they are not defined for one."
    parts = []
    if values["loss_std"] is not None:
        unit = " nats/token" if values.get("loss_per_token") else ""
        parts.append(
            f"losses differ by {short(values['loss_std'])}{unit} (std over workers, "
            f"{short(values['loss_range'])} from lowest to highest)"
        )
    if values["grad_norm_std"] is not None:
        verb = "" if parts else "differ "
        parts.append(f"gradient norms {verb}by {short(values['grad_norm_std'])}")
    if values["cosine_mean"] is not None:
        parts.append(f"two workers' gradients have a mean cosine of {values['cosine_mean']:.3f}")
    return f"On average over steps, {'; '.join(parts)}." if parts else ""


def _describe_samples(values: Values, causes: set[str]) -> str:
    if values["samples_drawn"] is None:
        return "The samples were not identified, so repeated ones cannot be seen."
    text = f"In the whole run, {_coverage(values)}"
    if values["effective_batch"] is not None:
        text += (
            f"; a global batch of {short(values['global_batch'])} held "
            f"{short(values['effective_batch'])} different ones on average"
        )
        if not causes and values["distinct_samples"] != values["samples_drawn"]:
            text += f"; the others are repeats in {_where_repeated(values)}"
    if not values["samples_exact"]:
        text += ". Some samples were not recorded, so the number of different ones is a lower bound"
    return text + "."


def _where_repeated(values: Values) -> str:
    """Return in words where samples come again, with the means of steps."""
    held, different = (float(values[name] or 0) for name in ("global_batch", "effective_batch"))
    within = round((held - different) * _number(values, "steps"))
    if not within:
        return "later steps, as in later epochs"
    others = _number(values, "samples_drawn") - _number(values, "distinct_samples")
    if values["repeats_between"] == 0 and within >= others:
        return "the same worker's batch of the same step"
    return "the same step" if within >= others else "the same step or in later ones"


def _describe_limits(values: Values, causes: set[str]) -> str:
    if values["num_workers"] == 1:
        return ""
    if "data.duplicate_batches" in causes:
        return (
            "Low dispersion with a high cosine is the mark of shared data here, not of health: "
            "workers that read the same batches agree because they repeat each other."
        )
    if "data.overlapping_shards" in causes:
        return (
            "None of the three metrics shows this: they look as they do with disjoint shards. "
            "Only the identity of the samples shows it."
        )
    if values["loss_std"] == 0 and _gradients_differ(values):
        return (
            "All workers report exactly the same loss although their gradients differ: the loss "
            "was probably averaged before it was recorded."
        )
    return (
        "The three metrics alone cannot distinguish disjoint from overlapping shards; the identity "
        "of the samples can."
    )


def _describe_chance(
    values: Values, findings: Sequence[Finding], progress: RunProgress
) -> Iterator[str]:
    """Describe what was looked for, and what chance had to be found."""
    yield _describe_budget(values, findings, progress)
    yield from describe_checks(progress.checks, _steps(values, progress))


def _describe_budget(values: Values, findings: Sequence[Finding], progress: RunProgress) -> str:
    """Describe the false-alarm probability behind the absence of outliers."""
    steps = int(values["steps"] or 0)
    num_workers = values["num_workers"] or 0
    found = any("false_alarm_probability" in finding.evidence for finding in findings)
    if found or num_workers < 2:
        return ""
    coverage = progress.coverage
    loss = ["loss"] if coverage is None or coverage.has_losses else []
    data = ["amount of data"] if values["samples_drawn"] is not None else []
    compared = [", ".join([*loss, "gradient"]), *data] if data else [*loss, "gradient"]
    text = f"No worker stands out from the others in {' or '.join(compared)}."
    if progress.earlier_steps is None:
        return text
    whole = "run" if not progress.earlier_steps else "training"
    steps += progress.earlier_steps
    before = ", those before its restarts included," if progress.earlier_steps else ""
    return (
        f"{text} A healthy {whole} of {count(steps, 'step')}{before} raises a finding of that kind "
        f"with a probability of at most {bound_in_words(steps)}."
    )


def _describe_cost(values: Values) -> str:
    share = values["overhead_share"]
    interval = values["interval"]
    if share is None:
        return ""
    text = f"Watching took {share:.1%} of the training's own time on the slowest worker"
    if interval is not None and interval > 1:
        text += f"; gradients were measured every {int(interval)} steps at the widest"
    fixed = values["overhead_fixed_seconds"]
    read = values["overhead_read_seconds"]
    if fixed is None or read is None:
        return text + "."
    shown = [f"{1e3 * seconds:.2g}" for seconds in (fixed, read)]
    whole = sum(map(float, shown)) / 1e3
    text += (
        f": {shown[0]} ms in every step whatever its length, and {shown[1]} ms to "
        f"read the gradient where it is measured; both are {whole / 0.1:.2%} of a step of 100 ms, "
        f"and {whole:.2%} of one of 1 second."
    )
    budget = values["overhead_budget"]
    if budget is not None:
        text += (
            f" The budget of {budget:.2%} was not kept: measuring less often saves the read only. "
            'tier="scalars" takes less; or set overhead_budget to what these short steps may pay.'
        )
    return text


def _coverage(values: Values) -> str:
    drawn = values["samples_drawn"]
    distinct = values["distinct_samples"]
    if drawn is None or distinct is None:
        return "the samples are not recorded"
    return f"{distinct:,} of the {drawn:,} samples drawn are different"


def _all_alike(values: Values) -> bool:
    cosine = values["cosine_mean"]
    spread = values["loss_range"]
    loss = values["loss_last"]
    if cosine is None or spread is None or loss is None or _number(values, "steps") < _FEW_STEPS:
        return False
    return cosine >= _ALIKE_COSINE and spread <= _ALIKE_LOSS * max(1.0, abs(loss))


def _gradients_differ(values: Values) -> bool:
    """Return whether norms or directions of the workers' gradients differ by more than rounding."""
    spread = values["grad_norm_std"]
    cosine = values["cosine_mean"]
    apart = cosine is not None and cosine < _ALIKE_COSINE
    return apart or (spread is not None and spread > _ALIKE_LOSS)


def _number(source: Values | Finding, name: str) -> int:
    value = source.evidence.get(name) if isinstance(source, Finding) else source[name]
    return int(value or 0)
