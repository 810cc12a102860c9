import logging
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.errors import RunError
from rankscope.evidence.loss.combine import amend
from rankscope.files import to_plain
from rankscope.record import Run, RunWriter
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, unpack_state
from rankscope.verdict.diagnosis import Diagnosis, diagnose_run, diagnosis_of, state_after
from support.streams import gathered, replicated, sharded

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
    workers = {**step.workers, "loss": losses_W, "nonfinite": ~np.isfinite(losses_W)}
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
    facts = {"environment": {"torch": "2.13"}, "sampler_seed": 4}
    ranks = [{"rank": rank, "host": host, **facts} for rank, host in enumerate(HOSTS)]
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
    Job(tmp_path / "run").run(stream(6), flush_at=(5,), save_at=(3,))
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
    (run.path / START_FILE).write_bytes(pack_state(unpack_state(start) | {"detectors": {}}))
    with pytest.raises(RunError, match=r"under other detectors .*another release"):
        diagnose_run(run)
    (run.path / START_FILE).unlink()
    with pytest.raises(RunError, match="is missing"):
        diagnose_run(run)


GROUPS = ("embedding", "layers.0", "head")
LAID_OUT_OTHERWISE = {"OverlappingShards", "ResumeMismatch"}  # the same samples, in other pieces
STEPS = 210
MICRO = 4


def make_step(t, batches, observed):
    width, rng = len(batches), np.random.default_rng([t, len(batches)])
    micro_losses_WM = 2 + rng.normal(size=(width, MICRO)) / 4
    sketches_WK = 0.5 + rng.normal(size=(width, 67)).astype(np.float32)
    step = gathered(
        t,
        batches,
        sketches_WK=sketches_WK if observed else None,
        samples_named=[True] * width,
        batch_digest=rng.integers(2**62, size=width),
        loss=micro_losses_WM.mean(axis=1),
        loss_sem=np.full(width, 0.1),
        loss_weight=rng.integers(90, 110, width),
        grad_scale=np.ones(width),
        grad_norm=np.linalg.norm(sketches_WK, axis=1) if observed else np.full(width, np.nan),
        reduced_norm=np.full(width, np.linalg.norm(sketches_WK.mean(axis=0))),
        optimizer_steps=np.ones(width),
        busy_seconds=rng.normal(0.1, 0.001, width),
        step_seconds=rng.normal(0.11, 0.001, width),
        lr=np.full(width, 1e-3),
    )
    weights, scales = (tuple(np.full((width, MICRO), each)) for each in (25.0, 1 / MICRO))
    losses = tuple(micro_losses_WM)
    step = replace(step, micro_losses=losses, micro_weights=weights, micro_scales=scales)
    if not observed:
        return step
    norms_W1 = step.workers["grad_norm"][:, None]
    return replace(
        step,
        micro_norms=tuple(norms_W1 * rng.uniform(1.5, 2.5, (width, MICRO))),
        reduced_copies=width,
        groups=GROUPS,
        group_norms_WG=rng.lognormal(0, 0.1, (width, 3)),
        group_sketches_WGK=rng.normal(size=(width, 3, 17)).astype(np.float32) + 0.5,
        residuals_WG=rng.uniform(2e-7, 4e-7, (width, 3)),
        total_residuals_W=rng.uniform(2e-7, 4e-7, width),
    )


def with_column(step, name, change):
    values = step.workers[name].copy()
    change(values)
    return replace(step, workers={**step.workers, name: values})


def one_odd(step):
    """Let worker 1's gradient be longer for a while, so that it is set apart and taken back."""
    if not 60 <= step.step < 150:
        return step
    return with_column(step, "grad_norm", lambda norms_W: norms_W.__setitem__(1, 1.5 * norms_W[1]))


def short_batches(step):
    batches = list(step.samples)
    if step.step % 23 == 7:
        batches[-1] = batches[-1][:1]
    if step.step % 41 == 5:
        batches[1] = batches[0]
    if step.step % 37 == 3:
        batches = [batch[:0] for batch in batches]
    workers = {**step.workers, "num_samples": np.array([len(batch) for batch in batches], np.int64)}
    return replace(step, samples=tuple(batches), workers=workers)


def not_finite(step):
    if step.step % 31 != 4:
        return step
    if step.sketches_WK is not None:
        sketches_WK = step.sketches_WK.copy()
        sketches_WK[0] = np.nan
        step = replace(step, sketches_WK=sketches_WK)
    step = with_column(step, "nonfinite", lambda flags_W: flags_W.__setitem__(0, True))
    return with_column(step, "loss", lambda losses_W: losses_W.__setitem__(0, np.nan))


def corrupted(step):
    if step.residuals_WG is None or step.step not in (100, 200):
        return step
    return replace(step, residuals_WG=step.residuals_WG + np.array([0.0, 1e-3, 0.0]))


def stale_tokens(step):
    return with_column(step, "loss_weight", lambda w: w.__setitem__(0, 2.0 if step.step % 2 else 0))


def several_faults(step):
    return stale_tokens(corrupted(not_finite(one_odd(step))))


def reports_of(change, width, every=1, num_steps=STEPS):
    batches = sharded(600, width, 3)
    steps = [change(make_step(t, next(batches), t % every == 0)) for t in range(num_steps)]
    return [summarize(amend(step)) for step in steps]


def digest(state):
    if isinstance(state, dict):
        return {name: digest(part) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return [digest(part) for part in state]
    return (str(state.dtype), state.tobytes()) if isinstance(state, np.ndarray) else repr(state)


SEVERAL = {"outlier-1", "numerics.nonfinite", "reduction-spike", "token-weighting-one-worker"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "width", "every", "finds"),
    [(short_batches, 8, 3, {"data.duplicate_batches"}), (several_faults, 4, 1, SEVERAL)],
)
def test_findings_and_all_that_is_remembered_are_the_same(change, width, every, finds):
    reports = reports_of(change, width, every)
    alone, together = Diagnosis(RunFacts(width)), Diagnosis(RunFacts(width))
    expected = [alone.observe(report) for report in reports]
    found, sizes = [], np.random.default_rng(width).integers(1, 65, STEPS).tolist()
    while len(found) < STEPS:
        found += together.observe_many(reports[len(found) : len(found) + sizes.pop()])
    assert found == expected
    assert together.findings == alone.findings
    assert finds <= {finding.id for finding in together.findings}
    one, other = alone.state()["detectors"], together.state()["detectors"]
    for name in set(one) - LAID_OUT_OTHERWISE:
        assert digest(other[name]) == digest(one[name]), name
    assert together.close() == alone.close()
