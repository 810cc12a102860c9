from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.evidence.dispersion.judge import Sampling
from rankscope.record import Run, RunWriter
from rankscope.verdict.assessment import assess
from rankscope.verdict.diagnosis import Diagnosis, diagnose_run
from support.micro_jobs import Job, micro_step
from support.stepping import told_of

SIMILAR, DIFFERENT = "sampling.too_similar", "sampling.too_different"


def watch(steps, num_workers=8, detector=None):
    detector = detector or Sampling(num_workers)
    told = told_of(detector, list(map(summarize, steps)))
    return [(step.step, one) for step, found in zip(steps, told, strict=True) for one in found]


def steps_of(job, num_steps, start=0):
    return [job.step(t) for t in range(start, start + num_steps)]


def opened(found, key):
    return next((t for t, evidence in found if evidence.key == key), None)


@pytest.mark.parametrize(("gradients", "workers"), [(False, 2), (True, 8)])
def test_healthy_jobs_say_nothing(workers, gradients):
    assert watch(steps_of(Job(0, workers=workers, gradients=gradients), 130), workers) == []


def test_shared_data_without_names_are_found_in_ten_steps():
    for seed in range(2):
        found = watch(steps_of(Job(seed, shared=1.0), 15))
        assert opened(found, SIMILAR) < 10
        evidence = found[-1][1]
        assert (evidence.cause, evidence.severity) == ("data.duplicate_batches", Severity.WARNING)
        assert evidence.first_step < 3
        assert evidence.numbers["dispersion_ratio"] < 1e-6
        assert {e.key for _, e in found} == {SIMILAR}


@pytest.mark.parametrize(
    ("key", "fault", "ratio"), [(SIMILAR, {"shared": 0.9}, 0.46), (DIFFERENT, {"kinds": 1.0}, 1.5)]
)
def test_a_spread_that_is_over_has_an_end_and_the_ratio_of_its_steps(key, fault, ratio):
    bad, good = Job(0, **fault), Job(1)
    found = watch([(bad if 60 <= t < 90 else good).step(t) for t in range(200)])
    last = [evidence for _, evidence in found if evidence.key == key][-1]
    assert last.status == "closed"
    assert abs(last.first_step - 60) <= 5
    assert abs(last.last_step - 90) <= 5
    assert last.numbers["dispersion_ratio"] == pytest.approx(ratio, rel=0.2)


def test_gradient_norms_alone_show_kinds_and_shared_data():
    def without_losses(job, t):
        return replace(job.step(t), micro_losses=(), micro_weights=())

    kinds = Job(4, micro=3, kinds=1.0, gradients=True)
    shared = Job(4, micro=3, shared=1.0, gradients=True)
    found = watch([without_losses(kinds, t) for t in range(60)])
    assert opened(found, DIFFERENT) < 50
    assert "gradient norms" in found[0][1].fields["what"]
    found = watch([without_losses(shared, t) for t in range(30)])
    assert opened(found, SIMILAR) < 25


def test_an_index_that_means_something_hides_no_kinds_and_makes_none():
    """Batches sorted by length: micro-batch 0 of all workers is long, and so on."""
    rng = np.random.default_rng(0)
    order = np.array([0.0, 2.0, 4.0, 6.0])
    steps = [micro_step(t, order + rng.standard_normal((8, 4))) for t in range(100)]
    assert opened(watch(steps), DIFFERENT) is None


def test_losses_that_were_averaged_before_are_not_shared_data():
    rng = np.random.default_rng(7)
    steps = []
    for t in range(30):
        gradients = rng.standard_normal((8, 4, 60)) if t % 3 == 0 else None
        steps.append(micro_step(t, np.tile(rng.normal(3, 0.3, 4), (8, 1)), gradients=gradients))
    assert opened(watch(steps), SIMILAR) is None


def test_workers_that_replay_their_own_batches_say_nothing():
    """The first step of each batch is a draw; its repeats are not."""
    own = np.random.default_rng(0).standard_normal((3, 8, 4))
    own[:] -= own.mean(axis=2, keepdims=True)  # all workers alike by chance, for ever
    digests = np.arange(24).reshape(3, 8)
    steps = [micro_step(t, 3 + own[t % 3], batch_digest=digests[t % 3]) for t in range(200)]
    assert watch(steps) == []


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


def test_a_record_gives_the_same_findings_as_the_live_run(tmp_path):
    run, live = record(tmp_path, steps_of(Job(1, gradients=True, shared=0.97, named=True), 50))
    assert {f.id for f in live} & {SIMILAR, DIFFERENT}
    assert diagnose_run(run) == live == run.findings()


def test_the_assessment_states_ratios_and_noise_scale_with_intervals(tmp_path):
    run, _ = record(tmp_path, steps_of(Job(1, gradients=True), 200), diagnosed=False)
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
