from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Finding, Severity
from rankscope.record import Run, RunWriter
from rankscope.record.states import START_FILE
from rankscope.report.live.catalog import ListedPlace, glance, stamp
from rankscope.verdict.assessment import assess, progress_of
from rankscope.verdict.coverage import checks_of, describe_checks
from rankscope.verdict.diagnosis import Diagnosis
from rankscope.verdict.verdicts import RunProgress, judge
from report.recorded_runs import gathered, record_run
from support.streams import sharded

STEPS = 30


SHARED = {"reading": "replicated"}
"""All workers draw the same batches."""


def unidentified(step):
    workers = {**step.workers, "num_samples": np.zeros(step.num_workers, np.int64)}
    return replace(step, workers=workers, samples=tuple(batch[:0] for batch in step.samples))


def test_equal_seeds_without_shards(tmp_path):
    found = assess(record_run(tmp_path / "run", **SHARED))
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
    found = assess(record_run(tmp_path / "run", num_steps=70))
    assert found.severity is None
    promise = "A healthy run of 70 steps raises a finding of that kind with a probability of"
    assert any(f"{promise} at most 7e-05." in text for text in found.statements)
    assert found.headline == (
        "Healthy: the 8 workers train on different samples, and disagree about as much as "
        "sampling alone explains."
    )
    assert found.recommendation == "Nothing to change."
    assert 0.7 < found.values["dispersion_ratio"] < 1.4
    assert found.values["distinct_samples"] == found.values["samples_drawn"] == 2240
    assert found.values["samples_exact"] is True
    (waiting,) = (text for text in found.statements if "yet checked" in text)
    assert waiting.startswith("Not yet checked: a worker that computes other results from the same")
    assert waiting.endswith(" batch (no canary has run yet).")


@pytest.mark.parametrize(("status", "word"), [("running", "early"), ("complete", "short")])
def test_too_few_steps_are_not_called_healthy(tmp_path, status, word):
    found = assess(record_run(tmp_path / "run", status=status))
    assert (found.severity, found.word) == (None, "early")
    assert found.headline == f"Too {word} to judge: no fault found in 30 steps."
    assert "34 more steps" in found.recommendation
    checked, waiting = (text for text in found.statements if "hecked" in text)
    assert checked.startswith("Checked so far: shared batches; values that are not finite;")
    assert "a worker that differs from the others" in checked
    assert "parameters, buffers and optimizer state (34 more steps)" in waiting


def test_without_sample_identity_only_exact_agreement_is_said(tmp_path):
    run = record_run(tmp_path / "run", change=unidentified)
    found = assess(run)
    assert found.severity is None
    assert "samples are unknown" in found.headline
    assert found.values["samples_drawn"] is None
    assert found.values["distinct_samples"] is None
    counted = {**found.values, "samples_drawn": 240, "global_batch": 8.0}  # and not identified
    assert "samples are unknown" in judge(counted, ()).headline
    run = record_run(tmp_path / "equal", change=unidentified, **SHARED)
    found = assess(run)
    assert found.severity is Severity.ERROR
    assert "the same loss and the same gradient, to the last bit" in found.headline
    for loss, spread in [(20.0, 1.8e-5), (0.01, 9e-7)]:  # float32 rounds them
        rounded = {**found.values, "loss_last": loss, "loss_range": spread}
        assert "the same losses and gradients" in judge(rounded, ()).headline


def test_repeats_inside_of_workers_are_told_from_those_between_them(tmp_path):
    def repeat(step, *, between):
        first, second, *others = step.samples
        second = np.append(second[1:], (first if between else second[1:])[0])
        return replace(step, samples=(first, second, *others))

    found = {}
    for between in (False, True):
        change = partial(repeat, between=between)
        found[between] = assess(record_run(tmp_path / str(between), change=change))
    assert "No fault found" in found[False].headline
    assert "inside of a worker's own batch" in found[False].headline
    assert any("the same worker's batch" in text for text in found[False].statements)
    assert "inside" not in found[True].headline
    assert not any("the same worker's batch" in text for text in found[True].statements)
    whole = {**found[False].values, "effective_batch": found[False].values["global_batch"]}
    closer = judge({**whole, "dispersion_ratio": 0.01}, ())
    assert "closer than parts of their batches" in closer.headline
    assert "group" in closer.recommendation


def test_one_worker_has_nothing_to_compare(tmp_path):
    found = assess(record_run(tmp_path / "run", num_workers=1))
    assert found.severity is None
    assert "nothing to compare" in found.headline
    for name in ("cosine_mean", "loss_std", "grad_norm_std"):
        assert found.values[name] is None


def test_a_run_without_steps(tmp_path):
    run = record_run(tmp_path / "run", num_steps=0)
    found = assess(run)
    assert found.severity is Severity.WARNING
    assert found.statements == ()
    assert "Nothing was recorded" in found.headline
    assert "Let it take a few steps" in found.recommendation
    assert judge(found.values, ()).severity is Severity.NOTE  # it may have just begun
    place = ListedPlace("run", run.path, "run")
    listed = glance(place, stamp(place, tmp_path))
    assert (listed.severity, f"{listed.headline}.") == ("warning", found.headline)
    for part, options in (("findings.jsonl", SHARED), ("workers", {}), ("steps", {})):
        other = record_run(tmp_path / part, **options)
        (other.path / part).rename(tmp_path / f"moved-{part}")
        lost = assess(Run.open(other.path))
        assert f"is missing: its directory has no {part}" in lost.headline
        place = ListedPlace("run", other.path, "run")
        assert lost.word == glance(place, stamp(place, tmp_path)).severity == "warning"
    cut = judge(found.values, (), RunProgress(status="interrupted"))
    assert "interrupted before its first step" in cut.headline
    assert "watch()" not in cut.recommendation


def test_a_verdict_on_a_worker_says_why_no_canary_ran(tmp_path):
    values = assess(record_run(tmp_path / "run")).values
    words = ("Rank 1 is far.", "Look.")
    odd = Finding("outlier-1", "data.worker_outlier", Severity.WARNING, (1,), 4, 9, *words)
    why = "FSDP2 shards the model"
    said = judge(values, [odd], RunProgress(no_canary=why)).recommendation
    assert said.endswith(f" No canary has run: {why}.")
    assert "canary" not in judge(values, [odd]).recommendation
    known = {"canary": why}
    for given, phrase in (({"canary": False}, "can run here"), ({}, "has run yet")):
        checks = checks_of(2, given, canaries=False, unmeasured=known)
        assert any(f"(no canary {phrase}: {why})" in text for text in describe_checks(checks, 99))


@pytest.mark.parametrize(("times", "told"), [(2, False), (3, True)])
def test_gross_values_are_the_verdict_once_three_came_within_50_steps(tmp_path, times, told):
    run = record_run(tmp_path / "run")
    evidence = {"times_in_50_steps": times}
    words = "At step 9 the loss of rank 1 was 9.0 times the largest. A step proves nothing."
    gross = Finding(
        "gross-value", "inconclusive", Severity.NOTE, (1,), 4, 9, words, "Look.", evidence
    )
    verdict = judge(assess(run).values, [gross])
    assert (verdict.about == gross) is told
    assert verdict.headline.startswith("At step 9 the loss of rank 1") is told


@pytest.mark.parametrize(
    ("last", "words"),
    [(7, "No fault found; the optimizer"), (29, "The optimizer skipped 8 steps of 30: the gradi")],
)
def test_steps_that_a_scaler_skips_again_and_again_are_the_verdict(tmp_path, last, words):
    values = assess(record_run(tmp_path / "run")).values
    name = "numerics.nonfinite"
    note = Finding(name, name, Severity.NOTE, (1,), 0, last, "It did.", "Nothing.", {"steps": 8})
    assert judge(values, [note]).headline.startswith(words)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "num_steps": 2}], ids=["healthy", "nothing proven"]
)
def test_a_run_whose_record_ends_early_is_not_called_healthy(tmp_path, options):
    found = {}
    for status in ("running", "complete", "incomplete"):
        found[status] = assess(record_run(tmp_path / status, status=status, **options))
    said = {"headline": "", "recommendation": ""}  # too early while it runs, else too short
    assert replace(found["running"], **said) == replace(found["complete"], **said)
    assert found["complete"].severity is None
    assert "ends early" not in found["complete"].headline
    early, last = found["incomplete"], options.get("num_steps", STEPS) - 1
    assert early.severity is Severity.NOTE  # a crash alone is no fault
    end = f"The record ends early, with step {last}: the training stopped there, or went on "
    assert early.headline.startswith(f"{end}without being recorded.")
    assert "Healthy" not in early.headline
    assert "See the log" in early.recommendation
    assert "Nothing to change." not in early.recommendation
    assert early.statements == found["complete"].statements
    if not options:  # a copy of a run whose writer was killed on another machine
        (tmp_path / "running" / ".writer").write_text('["elsewhere", "another boot"]')
        assert assess(Run.open(tmp_path / "running")).headline == early.headline


def test_an_early_end_stands_before_a_note(tmp_path):
    words = ("Tokens count differently. More of it.", "Divide them.")
    note = Finding("token-weighting", "loss.token_weighting", Severity.NOTE, (0, 1), 4, 9, *words)
    ended = at(5.0, KILLED, 0, last_step=30) + at(9.0, RAISED, 1, last_step=30)
    run = record_run(tmp_path / "run", num_workers=2, status="incomplete", ended=ended)
    verdict = judge(assess(run).values, [note], progress_of(run))
    end, _, rest = verdict.headline.partition(" Rank 0 ended first (process ended). ")
    assert end.startswith("The record ends early, with step")
    assert rest == "Tokens count differently."
    assert verdict.recommendation == "See the log of rank 0: others may only have followed."
    usual = replace(note, id="loss.token_weighting")  # the usual mean leaves a run healthy
    meant = judge(assess(run).values, [usual])
    assert meant.headline.startswith("Healthy: ")
    assert meant.recommendation == "Divide them."


KILLED, GONE = "its process ended", "its connection ended"
RAISED = "its training raised RuntimeError"


def at(time, why, *ranks, last_step=29):
    return [{"rank": rank, "last_step": last_step, "time": time, "why": why} for rank in ranks]


@pytest.mark.parametrize(
    ("ended", "words", "log"),
    [
        (
            at(5.0, KILLED, 1) + at(5.1, RAISED, 0, 2, last_step=30),
            "Rank 1 ended first (process ended).",
            "log of rank 1",
        ),
        (at(5.0, RAISED, 2), "Rank 2 ended first (training raised", "log of rank 2"),
        (at(5.0, RAISED, 2) + at(7.0, RAISED, 0, 1), "Rank 2 ended first", "log of rank 2"),
        (at(5.0, RAISED, 2, 0, 1), "All 3 workers ended there (training", "of the training."),
        (at(5.0, GONE, 2, 0, 1), "or went on without being recorded.", "See the log for"),
        ([{"rank": 1}], "or went on without being recorded.", "See the log for"),
        (
            at(5.0, "its process ended (killed by SIGKILL)", 0, 1, 2),
            "All 3 workers ended there (killed by SIGKILL).",
            "of what stopped the job.",
        ),
    ],
    ids=["killed", "alone on record", "raised before", "together", "gone", "damaged", "signal"],
)
def test_the_rank_that_ended_first_is_named(tmp_path, ended, words, log):
    run = record_run(tmp_path / "run", num_workers=3, status="incomplete", ended=ended)
    found = assess(run)
    assert words in found.headline
    assert log in found.recommendation
    order = [text for text in found.statements if "first to end" in text or "this order" in text]
    assert len(order) == words.startswith("Rank")
    place = ListedPlace("run", run.path, "run")
    listed = glance(place, stamp(place, tmp_path))
    assert listed.severity == "note"  # as the report has it, never healthy or early
    assert listed.headline.startswith("Ended early" if words.startswith("or") else words[:18])


def test_the_promise_about_a_run_that_continues_another_counts_the_steps_before(tmp_path):
    stream = sharded(4096, 8, 4)
    before = Diagnosis(RunFacts(8))
    for t, batches in enumerate(islice(stream, 11)):
        before.observe(summarize(gathered(t, batches, STEPS)))
    info = {"num_workers": 8, "continues": "sft"}
    writer = RunWriter(tmp_path / "sft-2", info, start=before.state())
    for t, batches in enumerate(islice(stream, 20), start=11):
        writer.add(summarize(gathered(t, batches, STEPS)))
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
    for i, option in enumerate([{}, {"setting": "s1-3"}, SHARED, {**SHARED, "setting": "s1-2"}]):
        run = record_run(tmp_path / str(i), **option)
        found = assess(run)
        texts = [found.headline, found.recommendation, *found.statements]
        texts += [text for f in run.findings() for text in (f.explanation, f.next_check)]
        for text in texts:
            assert text[0].isupper()
            assert text.endswith(".")
            assert ".." not in text
            assert not any(hole in text for hole in ("None,", "None.", "nan ", "{", "}", "  "))
