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
from support.streams import gathered, replicated, sharded

W = 8
HOSTS = ("a",) * 4 + ("b",) * 4


def stream(num_steps, *, seed=0, copied=False):
    """Return reports of a job with odd losses on rank 2 from step 12 on, and a NaN in step 9.

    It has four micro-batches a step and three groups. With ``copied``, rank 5 draws rank 4's
    samples in every other step, and the gradients of ranks 0 and 1 are alike.
    """
    rng = np.random.default_rng(seed)
    reports = []
    samples = replicated(300, 4, range(W)) if copied else sharded(3000, W, 4)
    for step, batches in enumerate(islice(samples, num_steps)):
        if copied and step % 2:
            batches[5] = batches[4]
        loss = rng.normal(2, 0.1, W)
        loss[2] += 0.5 * (step >= 12)
        micro_losses = loss[:, None] + rng.normal(0, 0.2, (W, 4))
        loss = micro_losses.mean(axis=1)
        if step == 9:
            loss[6] = np.nan
        sketches_WK = rng.normal(0.3, 1, (W, 53)).astype(np.float32)
        if copied:
            sketches_WK[1] = sketches_WK[0] + 0.5 * sketches_WK[1]
        norms_W = np.linalg.norm(sketches_WK, axis=1)
        report = gathered(
            step,
            batches,
            sketches_WK,
            loss=loss,
            grad_norm=norms_W,
            nonfinite=~np.isfinite(loss),
            optimizer_steps=[1] * W,
            samples_named=[True] * W,
            loss_weight=[80.0] * W,
            loss_sem=micro_losses.std(axis=1, ddof=1) / 2,
            busy_seconds=0.1 + 0.05 * (np.arange(W) == 3) + 0.001 * rng.random(W),
            step_seconds=[0.2] * W,
            reduced_norm=[float(np.linalg.norm(sketches_WK.mean(axis=0)))] + [0.0] * (W - 1),
        )
        report = replace(
            report,
            micro_losses=tuple(micro_losses),
            micro_weights=tuple(np.full((W, 4), 20.0)),
            micro_norms=tuple(norms_W[:, None] * rng.uniform(1.5, 2.5, (W, 4))),
            micro_scales=tuple(np.full((W, 4), 0.25)),
            groups=("embedding", "layers.0", "head"),
            group_norms_WG=rng.normal(1, 0.1, (W, 3)) + norms_W[:, None],
            group_sketches_WGK=rng.normal(0.3, 1, (W, 3, 31)).astype(np.float32),
        )
        reports.append(summarize(report))
    return reports


def through_a_file(state):
    return unpack_state(pack_state(state))


def plain(findings):
    return [to_plain(finding.to_json()) for finding in findings]


def spoken(findings):
    """Return findings in plain values, without notes on time: these begin a new window."""
    return plain(f for f in findings if f.cause != "time.straggler")


@pytest.mark.parametrize(("copied", "cut"), [(True, 1), (False, 13)])
def test_a_restored_diagnosis_says_what_one_without_a_break_says(copied, cut):
    reports = stream(80, copied=copied)
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
    """A run that is written as the scope writes it; it may be killed at any moment."""

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
    assert {f.id: str(f.severity) for f in after.findings} == {
        "data.duplicate_batches": "note",
        "seed-not-planned": "warning",
    }


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
    (run.path / START_FILE).write_bytes(b"?")
    with pytest.raises(RunError, match=r"cannot use .*detectors-start.npz: it is damaged"):
        diagnose_run(run)
    (run.path / START_FILE).unlink()
    with pytest.raises(RunError, match="is missing"):
        diagnose_run(run)
