"""Restarts: detectors that go on where they stood, from a state and from the record."""

import logging
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.errors import RunError
from rankscope.files import to_plain
from rankscope.record import Run, RunWriter
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, unpack_state
from rankscope.verdict.diagnosis import Diagnosis, diagnose_run, diagnosis_of, state_after
from support.streams import gathered, replicated

from .test_together import reports_of

W = 8
HOSTS = ("a",) * 4 + ("b",) * 4


def copied(step):
    """Let rank 5 draw rank 4's samples in every other step, and ranks 0 and 1 point alike."""
    batches, sketches_WK = list(step.samples), step.sketches_WK.copy()
    if step.step % 2:
        batches[5] = batches[4]
    sketches_WK[1] = sketches_WK[0] + 0.5 * sketches_WK[1]
    return replace(step, samples=tuple(batches), sketches_WK=sketches_WK)


def odd_losses(step):
    """Let rank 2's losses be higher from step 12 on, and rank 6's be NaN in step 9."""
    losses_W = step.workers["loss"] + 0.5 * (np.arange(W) == 2) * (step.step >= 12)
    losses_W[6] = np.nan if step.step == 9 else losses_W[6]
    nonfinite_W = ~np.isfinite(losses_W)
    workers = {**step.workers, "loss": losses_W, "nonfinite": nonfinite_W}
    return replace(step, workers=workers)


def stream(num_steps, change=odd_losses):
    return reports_of(change, W, num_steps=num_steps)


def through_a_file(state):
    return unpack_state(pack_state(state))


def plain(findings):
    return [to_plain(finding.to_json()) for finding in findings]


def spoken(findings):
    """Return findings in plain values, without notes on time: these begin a new window."""
    return plain(f for f in findings if f.cause != "time.straggler")


@pytest.mark.parametrize(("change", "cut"), [(copied, 1), (odd_losses, 13)])
def test_a_restored_diagnosis_says_what_one_without_a_break_says(change, cut):
    reports = stream(80, change)
    whole, first, second = (Diagnosis(RunFacts(W, HOSTS)) for _ in range(3))
    for report in reports[:cut]:
        assert whole.observe(report) == first.observe(report)
    second.restore(through_a_file(first.state()))
    assert plain(second.findings) == plain(first.findings)
    for report in reports[cut:]:
        assert spoken(whole.observe(report)) == spoken(second.observe(report))
    assert spoken(whole.close()) == spoken(second.close())
    assert len(spoken(whole.findings)) >= 2
    assert (second.num_steps, second.next_step) == (80, 80)


class Job:
    def __init__(self, path, *, continues=None, groups=()):
        info = {"num_workers": W, "options": {"groups": list(groups)}}
        info["ranks"] = [{"rank": rank, "host": host} for rank, host in enumerate(HOSTS)]
        self.diagnosis, start = Diagnosis(RunFacts(W, HOSTS)), None
        if continues is not None:
            start = state_after(continues, W, HOSTS, groups)
            assert start is not None
            info |= {"continues": continues.name, "first_step": start["step"] + 1}
            self.diagnosis.restore(through_a_file(start))
        self.writer = RunWriter(path, info, start=start)
        self.writer.add_findings(self.diagnosis.findings)

    def run(self, reports, *, flush_at=(), save_at=()):
        for report in reports:
            self.writer.add(report)
            self.writer.add_findings(self.diagnosis.observe(report))
            if report.step in flush_at:
                self.writer.flush()
            if report.step in save_at:
                self.writer.save_state(self.diagnosis.state)

    def close(self):
        self.writer.add_findings(self.diagnosis.close())
        self.writer.flush()
        self.writer.save_state(self.diagnosis.state, at_end=True)
        self.writer.close()
        return Run.open(self.writer.path)


def test_what_a_killed_run_wrote_last_is_held_against_its_own_plan(tmp_path):
    plan = {"random": "same", "repeats": True, "seed": 3}
    ranks = [
        {"rank": rank, "host": host, "environment": {"torch": "2.13"}, "sampler_seed": 4}
        for rank, host in enumerate(HOSTS)
    ]
    info = {"num_workers": W, "options": {"groups": [], "plan": plan}, "ranks": ranks}
    writer, reports = RunWriter(tmp_path / "run", info), copies(40)
    live = diagnosis_of(Run.open(tmp_path / "run"))
    for report in reports:
        writer.add(report)
        writer.add_findings(live.observe(report))
        if report.step == 0:
            writer.flush()
            writer.save_state(live.state)
    writer.flush()  # and is killed
    start = state_after(tmp_path / "run", W, HOSTS, ())
    live.close()
    after = Diagnosis(RunFacts(W, HOSTS))
    after.restore(through_a_file(start))
    assert plain(after.findings) == plain(live.findings)
    severities = {f.id: str(f.severity) for f in after.findings}
    assert severities == {"data.duplicate_batches": "note", "seed-not-planned": "warning"}


def copies(num_steps):
    """Return reports of a job whose workers all draw the same samples and random numbers."""
    drawn = {"rng_used": [4] * W, "optimizer_steps": [1] * W, "samples_named": [True] * W}
    return [
        summarize(gathered(step, batches * W, rng_digest=[100 + step] * W, **drawn))
        for step, batches in enumerate(islice(replicated(3000, 4, [0]), num_steps))
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: (run / STATE_FILE).write_bytes(b"?"), "detectors.npz is of no use: it is dam"),
        (lambda run: (run / STATE_FILE).unlink(), "it has no detectors.npz"),
        (lambda run: (run / "run.json").write_text("{"), "run is damaged"),
        (lambda run: (run / STATE_FILE).write_bytes(pack_state({"a": 1})), "not the state of a d"),
        (lambda run: (run / "steps" / "part-000000.parquet").write_text("?"), "it is damaged"),
    ],
)
def test_what_cannot_be_used_is_logged_once(tmp_path, caplog, damage, reason):
    job = Job(tmp_path / "run")
    job.run(stream(6), flush_at=(5,), save_at=(3,))
    damage(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "rankscope"):
        assert state_after(tmp_path / "run", W, HOSTS, ()) is None
    (message,) = caplog.messages
    assert reason in message
    assert "the detectors start anew" in message


def test_another_job_does_not_go_on(tmp_path, caplog):
    job = Job(tmp_path / "run", groups=("a", "b"))
    job.run(stream(3))
    job.close()
    with caplog.at_level(logging.WARNING, "rankscope"):
        assert state_after(tmp_path / "run", 4, HOSTS[:4], ("a", "b")) is None
        assert state_after(tmp_path / "run", W, HOSTS, ("a", "c")) is None
        assert state_after(tmp_path / "nothing", W, HOSTS, ()) is None
    assert "it had 8 workers, this job has 4" in caplog.messages[0]
    assert "other groups" in caplog.messages[1]
    assert "there is no run directory" in caplog.messages[2]


def test_a_continued_run_without_its_start_is_not_diagnosed_again(tmp_path):
    Job(tmp_path / "run").close()
    run = Job(tmp_path / "run-2", continues=tmp_path / "run").close()
    start = (run.path / START_FILE).read_bytes()
    (run.path / START_FILE).write_bytes(b"?")
    with pytest.raises(RunError, match=r"cannot use .*detectors-start.npz: it is damaged"):
        diagnose_run(run)
    older = unpack_state(start) | {"detectors": {}}
    (run.path / START_FILE).write_bytes(pack_state(older))
    with pytest.raises(RunError, match=r"under other detectors .*another release"):
        diagnose_run(run)
    (run.path / START_FILE).unlink()
    with pytest.raises(RunError, match="is missing"):
        diagnose_run(run)
