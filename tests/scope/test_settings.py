"""Settings, precision and random numbers that differ, or do not, in a job on real ranks."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.verdict.diagnosis import diagnose_run
from support.loops import PLAN, Loop
from support.models import make_batch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, RANKS = 24, (0, 1, 2)
FASTER, OTHER_PRECISION, SKIPPING, SKIPPED = 2, 1, 0, 10


class Augmented:
    """Batches of one rank, with a number that numpy draws in the process that loads them."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return STEPS

    def __getitem__(self, step):
        return make_batch(self.rank, step), np.random.random()  # noqa: NPY002


def seed_numpy(worker_id):
    np.random.seed(3)  # noqa: NPY002


def seed(number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def train(rank, run_dir, *, faulty):
    """Train with faults, or as one should; with a monitor if there is a place to record."""
    loop = Loop(rank, None)
    torch.manual_seed(5)
    init = {"worker_init_fn": seed_numpy} if faulty else {}
    own = torch.Generator().manual_seed(rank)
    loader = DataLoader(
        Augmented(rank),
        batch_size=None,
        num_workers=1,
        generator=own,
        multiprocessing_context="fork",
        **init,
    )
    if run_dir is not None:
        loop.watch(run_dir, loader=loader, plan={**PLAN, "learning_rate": 0.1})
    seed(7 if faulty else 7 + rank)
    if faulty and rank == FASTER:
        loop.optimizer.param_groups[0]["lr"] = 0.2
    drawn = []
    for step, (batch, noise) in enumerate(loader):
        with torch.autocast("cpu", enabled=faulty and rank == OTHER_PRECISION):
            loss = loop.ddp(**batch)["loss"]
        loss.backward()
        if not (faulty and rank == SKIPPING and step == SKIPPED):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        drawn.append(noise)
    loop.close()
    return {**loop.bits(), "drawn": drawn, "warnings": loop.warnings}


def train_both(rank, folder):
    return {
        faulty: [train(rank, run_dir, faulty=faulty) for run_dir in (None, f"{folder}/{faulty}")]
        for faulty in (False, True)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return run_ranks(partial(train_both, folder=str(folder)), len(RANKS)), folder


def findings(folder, name):
    run = Run.open(folder / name)
    recorded = run.findings()
    assert [one.to_json() for one in recorded] == [one.to_json() for one in diagnose_run(run)]
    return {one.id: one for one in recorded}


def test_each_fault_is_named_with_its_rank_and_since_when(trained):
    found = findings(trained[1], "True")
    expected = {
        "state.hyperparameters_differ": ((FASTER,), 0, Severity.ERROR),
        "optimizer-steps-differ": ((SKIPPING,), SKIPPED, Severity.ERROR),
        "env.mismatch": ((OTHER_PRECISION,), 0, Severity.WARNING),
        "rng.identical": (RANKS, 0, Severity.NOTE),
    }
    told = {name: (one.ranks, one.first_step, one.severity) for name, one in found.items()}
    assert {name: told.get(name) for name in expected} == expected
    assert found["loader-rng-identical"].ranks == RANKS
    assert found["loader-rng-identical"].cause == "rng.identical"


def test_a_job_without_these_faults_has_no_finding(trained):
    found = findings(trained[1], "False").values()
    assert [one for one in found if one.severity >= Severity.WARNING] == []


@pytest.mark.parametrize("faulty", [False, True])
def test_training_and_loading_go_on_bit_for_bit(trained, faulty):
    for by_fault in trained[0]:
        alone, watched = by_fault[faulty]
        assert watched == alone
        assert watched["warnings"] == []
