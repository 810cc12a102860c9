import numpy as np
import pytest
import torch.distributed as dist

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from support.fsdp2_modes import MODES
from support.fsdp2_training import local_gradient, optimize, start, train_step
from support.loops import bits_of, watch
from support.ranks import run_ranks
from support.recorded import SKETCH_NORM_ERROR, WIDTH, Recorded, Truth, cosines

pytestmark = pytest.mark.ranks

STEPS = 2
ATTACHED_LATE = ("accumulated", "shard size 1")
"""Modes that are watched when the training has begun."""


def train_unwatched(session, steps):
    for step in steps:
        train_step(session, step)
        optimize(session)


def train_mode(mode, folder):
    session = start(mode)
    first = 1 if mode.name in ATTACHED_LATE else 0
    train_unwatched(session, range(first))
    truths = []
    reduced = "norm" if mode.tier == "scalars" else "sketch"
    options = {"tier": mode.tier, "sketch_width": WIDTH, "reduced": reduced, "canary": False}
    run_dir = f"{folder}/{mode.name}/run"
    with watch(session.model, session.optimizer, run_dir=run_dir, **options) as scope:
        for step in range(first, STEPS):
            gradient, micro_squares = local_gradient(session, step)
            vectors = {name: v.double().flatten().numpy() for name, v in gradient.items()}
            micro_norms = (mode.accumulate * np.sqrt(micro_squares)).tolist()
            truths.append(Truth(vectors, micro_norms))
            if step == STEPS - 1 and mode.accumulate == 1:
                session.model.eval()  # which changes nothing in this model, and announces no pass
            train_step(session, step, see=scope.loss)
            optimize(session)
    train_unwatched(session, range(STEPS, STEPS + 1))
    alone = start(mode)
    train_unwatched(alone, range(STEPS + 1))
    return {
        "truths": truths,
        "bits": [bits_of(each.model, [each.optimizer]) for each in (session, alone)],
    }


def num_ranks_of(mode):
    """Return 4 where a mesh has two dimensions or a parameter's shards are uneven, and 2 else."""
    two_dimensions = mode.mesh != "1-D" or "reshard_after_forward" in mode.options
    return 4 if two_dimensions or mode.name in ("1-D", "second dimension cut") else 2


def work(rank, folder):
    modes = [mode for mode in MODES if num_ranks_of(mode) == dist.get_world_size()]
    return {mode.name: train_mode(mode, folder) for mode in modes}


@pytest.fixture(scope="module")
def by_number(folder):
    return {number: run_ranks(work, number, str(folder), timeout=240) for number in (2, 4)}


def runs_of(by_mode, mode, folder):
    runs = [Run.open(path) for path in (folder / mode.name).iterdir()]
    truths = [of_rank[mode.name]["truths"] for of_rank in by_mode]
    assert len(runs) == (2 if mode.mesh == "TP" else 1)
    return [
        Recorded(run, [truths[rank] for rank in run.info["job"]["ranks"]])
        if len(runs) > 1
        else Recorded(run, truths)
        for run in runs
    ]


def check_cosines(recorded, mode):
    if mode.tier == "scalars":
        assert recorded.run.table(Table.PAIRS).num_rows == 0
        for step, found in enumerate(recorded.column("cosine_weighted")):
            assert found == pytest.approx(recorded.weighted_cosine(step), abs=1e-6)
        return
    true = [cosines(recorded.gradients(step)) for step in recorded.steps]
    assert max(np.abs(np.triu(each, 1)).max() for each in true) < 0.9  # the workers do differ
    assert np.abs(recorded.cosine_errors()).max() <= 4 / WIDTH**0.5


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_is_recorded_is_the_gradient_of_the_unsharded_model_and_no_bit_changes(
    by_number, folder, mode
):
    ranks = by_number[num_ranks_of(mode)]
    for recorded in runs_of(ranks, mode, folder):
        assert len(recorded.steps) == recorded.num_steps
        assert (recorded.per_worker("grad_norm_estimated") == mode.parts).all()
        recorded.check_norms(5 * SKETCH_NORM_ERROR if mode.parts else 1e-5)
        recorded.check_groups(5 * SKETCH_NORM_ERROR if mode.parts else 1e-5)
        check_cosines(recorded, mode)
        if mode.reads_reduced:
            recorded.check_reduced(mode.rounding, sketched=mode.tier == "sketch")
        else:
            assert np.isnan(recorded.column("grad_norm_reduced")[-1])
        if mode.mesh == "TP":
            assert np.isnan(recorded.run.columns(Table.MICRO, "grad_norm")["grad_norm"]).all()
        else:
            recorded.check_micro_norms(1e-5, 1e-5 if mode.parts else 5 * SKETCH_NORM_ERROR)
        assert [f for f in recorded.run.findings() if f.severity > Severity.NOTE] == []
    for of_rank in ranks:
        watched, alone = of_rank[mode.name]["bits"]
        assert len(alone) > 20
        assert watched == alone
