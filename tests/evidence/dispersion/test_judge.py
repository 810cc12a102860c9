"""Workers that are all too similar, or all too different, in simulated jobs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.rules import RULES
from rankscope.evidence.dispersion.judge import Sampling
from rankscope.record import Run, RunWriter
from rankscope.stats.budget import SAMPLING, alarm_level
from rankscope.verdict.assessment import assess
from rankscope.verdict.diagnosis import Diagnosis, diagnose_run
from support.micro_jobs import Job, micro_step
from support.stepping import describe, told_of
from support.streams import gathered

SIMILAR, DIFFERENT = "sampling.too_similar", "sampling.too_different"


def watch(steps, num_workers=8, detector=None):
    """Return what the detector says, as pairs of step and evidence."""
    detector = detector or Sampling(num_workers)
    told = told_of(detector, list(map(summarize, steps)))
    return [(step.step, one) for step, found in zip(steps, told, strict=True) for one in found]


def steps_of(job, num_steps, start=0):
    return [job.step(t) for t in range(start, start + num_steps)]


def opened(found, key):
    return next((t for t, evidence in found if evidence.key == key), None)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("gradients", [False, True])
def test_healthy_jobs_say_nothing(workers, gradients):
    for seed in range(2):
        job = Job(seed, workers=workers, gradients=gradients)
        assert watch(steps_of(job, 130), workers) == []


def test_shared_data_without_names_are_found_in_ten_steps():
    for seed in range(5):
        found = watch(steps_of(Job(seed, shared=1.0), 15))
        assert opened(found, SIMILAR) < 10
        evidence = found[-1][1]
        assert evidence.cause == "data.duplicate_batches"
        assert evidence.severity is Severity.WARNING
        assert evidence.first_step < 3
        assert evidence.numbers["dispersion_ratio"] < 1e-6
        assert {e.key for _, e in found} == {SIMILAR}


def test_shared_data_with_different_dropout_are_found_too():
    found = watch(steps_of(Job(1, shared=0.95), 25))
    assert opened(found, SIMILAR) < 20
    assert 0 < found[-1][1].numbers["dispersion_ratio"] < 0.6
    for _, evidence in found:
        assert float(evidence.fields["bound"]) >= evidence.numbers["false_alarm_probability"]


def test_the_onset_is_estimated():
    steps = steps_of(Job(1), 60) + steps_of(Job(2, shared=1.0), 20, start=60)
    found = watch(steps)
    assert 60 < opened(found, SIMILAR) < 75
    assert 55 <= found[0][1].first_step <= 64


def test_data_of_different_kinds_are_a_note():
    found = watch(steps_of(Job(3, kinds=1.0), 60))
    assert opened(found, DIFFERENT) < 50
    assert {e.severity for _, e in found} == {Severity.NOTE}
    assert {e.cause for _, e in found} == {"inconclusive"}
    assert found[-1][1].numbers["dispersion_ratio"] > 1.2


@pytest.mark.parametrize("micro", [3, 4])
def test_gradient_norms_alone_show_kinds_and_shared_data(micro):
    def without_losses(job, t):
        return replace(job.step(t), micro_losses=(), micro_weights=())

    kinds = Job(4, micro=micro, kinds=1.0, gradients=True)
    shared = Job(4, micro=micro, shared=1.0, gradients=True)
    found = watch([without_losses(kinds, t) for t in range(60)])
    assert opened(found, DIFFERENT) < 50
    assert "gradient norms" in found[0][1].fields["what"]
    found = watch([without_losses(shared, t) for t in range(30)])
    assert opened(found, SIMILAR) < 25


def test_where_samples_are_known_to_differ_it_is_a_note_with_other_advice():
    found = watch(steps_of(Job(5, shared=0.97, named=True), 30))
    assert {(e.key, e.severity) for _, e in found} == {(SIMILAR, Severity.NOTE)}
    text, advice = describe(found[-1][1])
    assert "no two of them draw the same sample" in text
    assert advice.startswith("Nothing, if")


def test_an_index_that_means_something_hides_no_kinds_and_makes_none():
    """Batches sorted by length: micro-batch 0 of all workers is long, and so on."""
    rng = np.random.default_rng(0)
    order = np.array([0.0, 2.0, 4.0, 6.0])
    steps = [micro_step(t, order + rng.standard_normal((8, 4))) for t in range(100)]
    assert opened(watch(steps), DIFFERENT) is None


def test_identical_batches_are_left_to_exact_evidence():
    job = Job(6, shared=1.0)
    batches = [[np.array([3 * t, 3 * t + 1])] * 8 for t in range(30)]
    steps = [replace(job.step(t), samples=tuple(batches[t])) for t in range(30)]
    assert watch(steps) == []
    diagnosis = Diagnosis(RunFacts(8))
    for step in steps:
        diagnosis.observe(summarize(step))
    assert "data.duplicate_batches" in {f.id for f in diagnosis.findings}
    assert SIMILAR not in {f.id for f in diagnosis.findings}


def test_losses_that_were_averaged_before_are_not_shared_data():
    rng = np.random.default_rng(7)
    steps = []
    for t in range(30):
        gradients = rng.standard_normal((8, 4, 60)) if t % 3 == 0 else None
        losses = np.tile(rng.normal(3, 0.3, 4), (8, 1))
        steps.append(micro_step(t, losses, gradients=gradients))
    assert opened(watch(steps), SIMILAR) is None


def test_workers_that_replay_their_own_batches_say_nothing():
    """The first step of each batch is a draw; its repeats are not."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        own = rng.standard_normal((3, 8, 4))
        own[:] -= own.mean(axis=2, keepdims=True)  # all workers alike by chance, for ever
        steps = [
            micro_step(t, 3 + own[t % 3], batch_digest=np.arange(8) + 8 * (t % 3))
            for t in range(200)
        ]
        assert watch(steps) == []


def test_a_finding_closes_when_the_fault_heals_and_stays_closed():
    steps = steps_of(Job(8, shared=1.0), 40) + steps_of(Job(9), 400, start=40)
    found = [(t, e) for t, e in watch(steps) if e.key == SIMILAR]
    closed = [t for t, e in found if e.status == "closed"]
    assert len(closed) == 1
    assert 45 < closed[0] < 250
    assert found[-1][0] == closed[0]
    evidence = found[-1][1]
    assert evidence.last_step < closed[0]
    assert "until step" in describe(evidence)[0]


def per_sample_step(t, ratio, rng):
    """A step whose losses are known by sample: a standard error of 0.1 each, and one loss."""
    losses = 3 + 0.1 * ratio * rng.standard_normal(8)
    sems = 0.1 * np.sqrt(rng.chisquare(7, 8) / 7)
    return gathered(t, [np.empty(0)] * 8, loss=losses, loss_sem=sems)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.3, "less than different samples would give: the workers share data"),
        (1.0, "that different samples of the same data may give"),
        (3.0, "more than sampling gives: the workers' data, or their state, differ in kind"),
    ],
)
def test_without_micro_batches_the_report_alone_states_the_ratio(tmp_path, ratio, words):
    rng = np.random.default_rng(0)
    steps = [per_sample_step(t, ratio, rng) for t in range(160)]
    run, found = record(tmp_path, steps)
    assert not found
    assessed = assess(run)
    assert assessed.values["dispersion_ratio"] == pytest.approx(ratio, rel=0.1)
    assert any(words in statement for statement in assessed.statements)


def test_one_worker_and_steps_without_losses_say_nothing():
    assert watch([micro_step(t, np.ones((1, 4))) for t in range(3)], 1) == []
    assert watch([gathered(t, [np.empty(0)] * 4) for t in range(3)], 4) == []
    bad = np.array([[1.0, math.nan, 2.0]] * 4)
    assert watch([micro_step(t, bad) for t in range(3)], 4) == []


@pytest.mark.parametrize("size", [1e200, 1e-200, math.inf])
def test_numbers_near_the_ends_of_the_range_do_no_harm(tmp_path, size):
    rng = np.random.default_rng(0)
    steps = []
    for t in range(12):
        step = micro_step(t, rng.random((4, 3)), gradients=rng.standard_normal((4, 3, 60)))
        workers = {name: step.workers[name] * size for name in ("loss", "loss_sem", "grad_norm")}
        workers["reduced_norm"] = step.workers["reduced_norm"] * min(size, 1.0)
        norms = tuple(norms * size for norms in step.micro_norms)
        steps.append(replace(step, workers={**step.workers, **workers}, micro_norms=norms))
    assert watch(steps, 4) == []
    run, _ = record(tmp_path, steps, 4, diagnosed=False)
    assert assess(run).values["gradient_ratio"] is None


def test_the_levels_of_both_tails_share_the_budget():
    sampling = Sampling(8)
    levels = [sampling._low._level, sampling._high._level]
    assert sum(1 / level for level in levels) == pytest.approx(1 / alarm_level(SAMPLING))


def test_every_text_is_complete():
    jobs = [Job(1, shared=1.0), Job(3, kinds=1.5), Job(5, shared=1.0, named=True)]
    found = [e for job in jobs for _, e in watch(steps_of(job, 40))]
    assert {e.key for e in found} == {SIMILAR, DIFFERENT}
    for evidence in found:
        assert evidence.severity in RULES[evidence.key].advice
        for text in describe(evidence):
            assert text.endswith(".")
            assert "{" not in text
            assert "nan" not in text


def test_a_detector_goes_on_after_a_restart_where_it_stood():
    steps = steps_of(Job(1, gradients=True), 40) + steps_of(
        Job(2, shared=1.0, gradients=True), 20, start=40
    )
    whole = watch(steps)
    first, second = Sampling(8), Sampling(8)
    found = watch(steps[:45], detector=first)
    second.restore(first.state())
    found += watch(steps[45:], detector=second)
    assert found == whole
    assert opened(whole, SIMILAR) is not None


def record(path, steps, num_workers=8, *, diagnosed=True):
    diagnosis = Diagnosis(RunFacts(num_workers))
    writer = RunWriter(path / "run", {"num_workers": num_workers})
    for step in steps:
        report = summarize(step)
        writer.add(report)
        if diagnosed:
            writer.add_findings(diagnosis.observe(report))
    writer.add_findings(diagnosis.close())
    writer.close()
    return Run.open(path / "run"), diagnosis.findings


@pytest.mark.parametrize(
    "options", [{"shared": 1.0}, {"kinds": 1.0}, {"shared": 0.97, "named": True}], ids=str
)
def test_a_record_gives_the_same_findings_as_the_live_run(tmp_path, options):
    run, live = record(tmp_path, steps_of(Job(1, gradients=True, **options), 50))
    assert {f.id for f in live} & {SIMILAR, DIFFERENT}
    assert diagnose_run(run) == live == run.findings()


def test_the_assessment_of_shared_data_without_names(tmp_path):
    run, _ = record(tmp_path, steps_of(Job(1, shared=1.0, gradients=True), 40))
    found = assess(run)
    assert found.severity is Severity.ERROR
    assert found.headline.startswith("Ranks 0–7 had the same loss and the same gradient, to the")
    alike = "The workers are more alike than sampling explains"
    assert any(alike in one.explanation for one in run.findings())
    assert found.values["gradient_ratio"] < 1e-3
    assert not any("noise scale" in text for text in found.statements)


def test_the_assessment_states_ratios_and_noise_scale_with_intervals(tmp_path):
    run, _ = record(tmp_path, steps_of(Job(1, gradients=True), 300), diagnosed=False)
    found = assess(run)
    values = found.values
    assert values["dispersion_ratio_low"] < 1 < values["dispersion_ratio_high"]
    assert 0.9 < values["gradient_ratio"] < 1.1
    assert values["gradient_ratio_low"] < values["gradient_ratio"] < values["gradient_ratio_high"]
    truth = 60 / (60 * 0.1**2)
    assert values["noise_scale_low"] < truth < values["noise_scale_high"]
    assert (values["noise_scale_batch"], values["noise_scale_in_samples"]) == (32, False)
    [text] = [text for text in found.statements if "noise scale" in text]
    assert "micro-batches (95 % interval" in text
    assert "a step averages 32." in text
    assert any("as their micro-batches explain (95 % interval" in t for t in found.statements)


def test_the_noise_scale_is_in_samples_where_these_are_counted(tmp_path):
    steps = [
        replace(step, workers={**step.workers, "num_samples": np.full(8, 12)})
        for step in steps_of(Job(1, gradients=True), 300)
    ]
    run, _ = record(tmp_path, steps, diagnosed=False)
    values = assess(run).values
    truth = 60 / (60 * 0.1**2) * 3
    assert values["noise_scale_low"] < truth < values["noise_scale_high"]
    assert values["noise_scale_batch"] == 96


def test_without_micro_batches_the_noise_scale_is_called_what_it_is(tmp_path):
    steps = [
        replace(step, micro_losses=(), micro_weights=(), micro_norms=())
        for step in steps_of(Job(1, gradients=True), 300)
    ]
    run, _ = record(tmp_path, steps, diagnosed=False)
    found = assess(run)
    assert found.values["gradient_ratio"] is None
    assert found.values["noise_scale"] == pytest.approx(100 / 4, rel=0.3)
    assert any("the weighted cosine in other words" in text for text in found.statements)
    assert sum("cannot be known" in text for text in found.statements) <= 1


def test_few_steps_give_no_interval_and_no_noise_scale_in_words(tmp_path):
    run, _ = record(tmp_path, steps_of(Job(1, gradients=True), 4))
    found = assess(run)
    assert found.values["dispersion_ratio"] is not None
    assert found.values["dispersion_ratio_low"] is None
    assert not any("noise scale" in text for text in found.statements)


def test_a_worker_that_was_found_to_differ_does_not_count_as_spread():
    """One fault is one finding: what one worker does is no evidence about all of them."""
    rng = np.random.default_rng(3)
    spread = np.where(np.arange(8) == 5, 1.0, 0.0)[:, None]
    steps = [micro_step(t, 2 + spread + 0.1 * rng.standard_normal((8, 4))) for t in range(80)]
    assert {found.key for _, found in watch(steps)} == {DIFFERENT}
    assert watch(steps, detector=Sampling(8, lambda: (5,))) == []


def test_two_workers_that_are_left_are_compared_and_one_is_not():
    steps = steps_of(Job(1, workers=3, shared=1.0), 60)
    assert opened(watch(steps, detector=Sampling(3, lambda: (2,))), SIMILAR) is not None
    assert watch(steps, detector=Sampling(3, lambda: (1, 2))) == []
