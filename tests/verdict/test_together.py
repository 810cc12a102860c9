"""Steps that are handled together give what they give one by one, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.evidence.loss.combine import amend
from rankscope.verdict.diagnosis import Diagnosis
from support.streams import gathered, sharded

GROUPS = ("embedding", "layers.0", "head")
LAID_OUT_OTHERWISE = {"OverlappingShards", "ResumeMismatch"}  # the same samples, in other pieces
STEPS = 210
MICRO = 4


def make_step(t, batches, observed):
    """Return a step of a healthy job of four micro-batches, with all that detectors read often."""
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
    step = replace(
        step,
        micro_losses=tuple(micro_losses_WM),
        micro_weights=tuple(np.full((width, MICRO), 25.0)),
        micro_scales=tuple(np.full((width, MICRO), 1 / MICRO)),
    )
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
    """Give the last worker a short batch now and then, two workers the same one, or none at all."""
    batches = list(step.samples)
    if step.step % 23 == 7:
        batches[-1] = batches[-1][:1]
    if step.step % 41 == 5:
        batches[1] = batches[0]
    if step.step % 37 == 3:
        batches = [batch[:0] for batch in batches]
    sizes = [len(batch) for batch in batches]
    workers = {**step.workers, "num_samples": np.array(sizes, np.int64)}
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
    """Return a state in which arrays and NaN can be compared."""
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
