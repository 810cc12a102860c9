"""Uneven inputs: ranks that have run out of data shadow the steps of the others in ``join()``."""

from typing import Any

import numpy as np
import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import Loop
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

NUM_STEPS = (5, 3, 4)
"""Steps for which each rank has data, in each of two epochs."""

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "micro-batches": {},
}


def train(rank: int, way: str, run_dir: str | None) -> dict[str, Any]:
    loop = Loop(rank, run_dir, ddp=dict(WAYS[way]))
    losses, norms = [], []
    for epoch in range(2):
        with loop.ddp.join():
            for step in range(NUM_STEPS[rank]):
                number = 100 * epoch + 2 * step
                batches = (number, number + 1) if way == "micro-batches" else (number + 1,)
                norms.append(loop.exact_norm(*batches))
                if way == "micro-batches":
                    with loop.ddp.no_sync():
                        loop.forward(number).backward()
                loss = loop.forward(number + 1)
                loss.backward()
                losses.append(loss.item())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    loop.close()
    assert loop.warnings == []
    return {"losses": losses, "norms": norms, "bits": loop.bits()}


trained = alone_and_watched(train, WAYS, 3)


@pytest.mark.parametrize("way", WAYS)
def test_the_steps_of_the_others_go_on(trained, way):
    results, folder = trained
    run = Run.open(folder / way)
    assert run.status == "complete"
    present_TW = np.array([[step < n for n in NUM_STEPS] for step in range(max(NUM_STEPS))])
    present_TW = np.concatenate([present_TW, present_TW])
    observed = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
    assert observed.tolist() == present_TW.all(axis=1).tolist()
    for rank, by_way in enumerate(results):
        alone, watched = by_way[way]
        assert alone["bits"] == watched["bits"], rank
        assert alone["losses"] == watched["losses"]
    _, samples_TW = run.per_worker("num_samples")
    per_step = 6 if way == "micro-batches" else 3
    assert np.nan_to_num(samples_TW).tolist() == (per_step * present_TW).tolist()
    for name in ("loss", "grad_norm"):
        _, values_TW = run.per_worker(name)
        assert np.isfinite(values_TW).tolist() == present_TW.tolist()
    for norms_T, present_T, by_way in zip(values_TW.T, present_TW.T, results, strict=True):
        np.testing.assert_allclose(norms_T[present_T], by_way[way][1]["norms"], rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_has_run_out_of_data_is_not_said_to_differ(trained, way):
    """It makes no optimizer step, so its momenta do differ from the second epoch on."""
    found = Run.open(trained[1] / way).findings()
    kinds = ("sync.", "state.parameters", "state.optimizer", "state.hyper")
    told = [finding for finding in found if finding.cause.startswith(kinds)]
    assert all(finding.first_step >= max(NUM_STEPS) for finding in told)
    assert {finding.cause for finding in told} >= {"state.optimizer_differs"}
