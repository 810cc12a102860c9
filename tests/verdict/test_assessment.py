"""Assessments of recorded runs whose samples, losses and gradients are simulated."""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Finding, Severity
from rankscope.record import Run, RunWriter
from rankscope.record.states import START_FILE
from rankscope.verdict.assessment import assess
from rankscope.verdict.diagnosis import Diagnosis, diagnose_run
from rankscope.verdict.verdicts import RunProgress, judge
from support.losses import mean_and_sem
from support.stepping import events_of
from support.streams import gathered, replicated, sharded, with_replacement

STEPS = 30


def sample_loss(sample):
    """Loss, label tokens and gradient of a sample, a function of its number alone."""
    rng = np.random.default_rng(sample)
    return rng.gamma(4.0, 0.5), float(rng.integers(20, 60)), rng.standard_normal(60) + 0.02


def step_of(t, batches, *, identified=True, per_sample=True, shift=0.0):
    losses, sems, rows = [], [], []
    for rank, batch in enumerate(batches):
        values, weights, gradients = zip(*map(sample_loss, batch.tolist()), strict=True)
        mean, sem = mean_and_sem(np.array(values), np.array(weights))
        losses.append(mean + shift * rank - 0.01 * t)
        sems.append(sem if per_sample else math.nan)
        rows.append(np.mean(gradients, axis=0))
    return gathered(
        t,
        batches if identified else [batch[:0] for batch in batches],
        sketches_WK=np.array(rows, np.float32),
        loss=losses,
        loss_sem=sems,
        grad_norm=np.linalg.norm(rows, axis=1),
    )


def record(path, stream, steps=STEPS, num_workers=8, status="complete", **options):
    """Record a run with its live findings; return it and them. ``running``: it is not closed."""
    diagnosis = Diagnosis(RunFacts(num_workers))
    writer = RunWriter(path / "run", {"num_workers": num_workers})
    reports = [
        summarize(step_of(t, batches, **options)) for t, batches in enumerate(islice(stream, steps))
    ]
    writer.add_many(reports)
    writer.add_findings(events_of(diagnosis, reports))
    writer.add_findings(diagnosis.close())
    writer.flush()
    if status != "running":
        writer.close(status)
    return Run.open(path / "run"), diagnosis.findings


def test_equal_seeds_without_shards(tmp_path):
    run, _ = record(tmp_path, replicated(4096, 4, [0] * 8))
    found = assess(run)
    assert found.severity is Severity.ERROR
    assert found.headline == (
        "All 8 workers train on the same batches: the job does the work of one worker."
    )
    assert "DistributedSampler" in found.recommendation
    assert any("mark of shared data" in text for text in found.statements)
    assert any("the workers share data" in text for text in found.statements)
    assert found.values["loss_std"] == 0.0
    assert found.values["cosine_mean"] == 1.0
    assert found.values["dispersion_ratio"] == 0.0
    assert (found.values["distinct_samples"], found.values["samples_drawn"]) == (120, 960)
    assert found.values["effective_batch"] == 4.0


def test_healthy_shards(tmp_path):
    run, _ = record(tmp_path, sharded(4096, 8, 4), steps=70)
    found = assess(run)
    assert found.severity is None
    assert any(
        "A healthy run of 70 steps raises a finding of that kind with a probability of at most "
        "7e-05." in text
        for text in found.statements
    )
    assert found.headline == (
        "Healthy: the 8 workers train on different samples, and disagree about as much as "
        "sampling alone explains."
    )
    assert found.recommendation == "Nothing to change."
    assert 0.7 < found.values["dispersion_ratio"] < 1.4
    assert found.values["distinct_samples"] == found.values["samples_drawn"] == 2240
    assert found.values["samples_exact"] is True
    (waiting,) = (text for text in found.statements if "yet checked" in text)
    assert waiting == (
        "Not yet checked: a worker that computes other results from the same batch (no canary has "
        "run yet)."
    )


@pytest.mark.parametrize(("status", "word"), [("running", "early"), ("complete", "short")])
def test_too_few_steps_are_not_called_healthy(tmp_path, status, word):
    run, _ = record(tmp_path, sharded(4096, 8, 4), status=status)
    found = assess(run)
    assert (found.severity, found.word) == (None, "early")
    assert found.headline == f"Too {word} to judge: no fault found in 30 steps."
    assert "34 more steps" in found.recommendation
    checked, waiting = found.statements[-2:]
    assert checked.startswith("Checked so far: shared batches; values that are not finite;")
    assert "a worker that differs from the others" in checked
    assert "parameters, buffers and optimizer state (34 more steps)" in waiting


def test_without_sample_identity_only_exact_agreement_is_said(tmp_path):
    run, _ = record(tmp_path, sharded(4096, 8, 4), identified=False)
    found = assess(run)
    assert found.severity is None
    assert "samples are unknown" in found.headline
    assert found.values["samples_drawn"] is None
    assert found.values["distinct_samples"] is None
    (tmp_path / "equal").mkdir()
    run, _ = record(tmp_path / "equal", replicated(4096, 4, [0] * 8), identified=False)
    found = assess(run)
    assert found.severity is Severity.ERROR
    assert "the same loss and the same gradient, to the last bit" in found.headline
    for loss, spread in [(20.0, 1.8e-5), (0.01, 9e-7)]:  # float32 rounds them
        rounded = {**found.values, "loss_last": loss, "loss_range": spread}
        assert "the same losses and gradients" in judge(rounded, ()).headline


def test_one_worker_has_nothing_to_compare(tmp_path):
    run, _ = record(tmp_path, sharded(4096, 1, 4), num_workers=1)
    found = assess(run)
    assert found.severity is None
    assert "nothing to compare" in found.headline
    assert found.values["cosine_mean"] is None


def test_a_run_without_steps(tmp_path):
    run, _ = record(tmp_path, iter([]))
    found = assess(run)
    assert found.severity is Severity.WARNING
    assert found.statements == ()
    assert "Nothing was recorded" in found.headline
    assert "Let it take a few steps" in found.recommendation
    assert judge(found.values, ()).severity is Severity.NOTE  # it may have just begun
    cut = judge(found.values, (), RunProgress(status="interrupted"))
    assert "interrupted before its first step" in cut.headline
    assert "watch()" not in cut.recommendation


@pytest.mark.parametrize(("times", "told"), [(2, False), (3, True)])
def test_gross_values_are_the_verdict_once_three_came_within_50_steps(tmp_path, times, told):
    run, _ = record(tmp_path, sharded(4096, 8, 4))
    evidence = {"times_in_50_steps": times}
    words = "At step 9 the loss of rank 1 was 9.0 times the largest. A step proves nothing."
    gross = Finding(
        "gross-value", "inconclusive", Severity.NOTE, (1,), 4, 9, words, "Look.", evidence
    )
    verdict = judge(assess(run).values, [gross])
    assert (verdict.about == gross) is told
    assert verdict.headline.startswith("At step 9 the loss of rank 1") is told


@pytest.mark.parametrize(
    "options",
    [
        {"stream": lambda: sharded(4096, 8, 4)},
        {"stream": lambda: replicated(4096, 1, [0] * 8), "steps": 2},
    ],
    ids=["healthy", "nothing proven"],
)
def test_a_run_whose_record_ends_early_is_not_called_healthy(tmp_path, options):
    found = {}
    for status in ("running", "complete", "incomplete"):
        (tmp_path / status).mkdir()
        given = {**options, "stream": options["stream"]()}
        found[status] = assess(record(tmp_path / status, status=status, **given)[0])
    said = {"headline": "", "recommendation": ""}  # too early while it runs, else too short
    assert replace(found["running"], **said) == replace(found["complete"], **said)
    assert found["complete"].severity is None
    assert "ends early" not in found["complete"].headline
    early, last = found["incomplete"], options.get("steps", STEPS) - 1
    assert early.severity is Severity.NOTE  # a crash alone is no fault
    assert early.headline.endswith(
        f"The record ends early, with step {last}: the training stopped there, or went on "
        "unwatched."
    )
    assert "Healthy" not in early.headline
    assert "See the log" in early.recommendation
    assert "Nothing to change." not in early.recommendation
    assert early.statements == found["complete"].statements


def test_the_promise_about_a_run_that_continues_another_counts_the_steps_before(tmp_path):
    stream = sharded(4096, 8, 4)
    before = Diagnosis(RunFacts(8))
    for t, batches in enumerate(islice(stream, 11)):
        before.observe(summarize(step_of(t, batches)))
    info = {"num_workers": 8, "continues": "sft"}
    writer = RunWriter(tmp_path / "sft-2", info, start=before.state())
    for t, batches in enumerate(islice(stream, 20), start=11):
        writer.add(summarize(step_of(t, batches)))
    writer.close()
    run, nobody = Run.open(tmp_path / "sft-2"), "No worker stands out from the others"
    [said] = [text for text in assess(run).statements if nobody in text]
    assert "A healthy training of 31 steps, those before its restarts included," in said
    assert said.endswith("with a probability of at most 4e-05.")
    for damage in (lambda file: file.write_bytes(b"PK no archive"), lambda file: file.unlink()):
        damage(run.path / START_FILE)
        [said] = [text for text in assess(run).statements if nobody in text]
        assert "probability" not in said


def test_statements_are_sentences_without_holes(tmp_path):
    streams = [
        sharded(4096, 8, 4),
        replicated(900, 4, [0] * 8),
        replicated(900, 4, [1] + [0] * 7),
        with_replacement(900, 8, 4),
    ]
    for i, stream in enumerate(streams):
        (tmp_path / str(i)).mkdir()
        run, findings = record(tmp_path / str(i), stream)
        found = assess(run)
        texts = [found.headline, found.recommendation, *found.statements]
        texts += [text for f in findings for text in (f.explanation, f.next_check)]
        for text in texts:
            assert text[0].isupper()
            assert text.endswith(".")
            assert ".." not in text
            assert not any(hole in text for hole in ("None,", "None.", "nan ", "{", "}", "  "))


def test_a_record_gives_the_same_findings_as_the_live_run(tmp_path):
    run, live = record(tmp_path, replicated(300, 4, [1] + [0] * 7), steps=60)
    assert diagnose_run(run) == live
    assert run.findings() == live
