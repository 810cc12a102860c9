import copy
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.record.states import STATE_FILE, read_number
from rankscope.verdict.assessment import progress_of
from rankscope.verdict.diagnosis import diagnose_run
from support.findings import faults
from support.loops import train_watched, watch
from support.ranks import alone_and_watched, on_ranks

pytestmark = pytest.mark.ranks

STEPS, BACK = 12, 2


def train(rank, run_dir, model, begin):
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = []  # each step

    def loss_of(step):
        before.append(copy.deepcopy(model))
        draw = torch.Generator().manual_seed(2 * (begin + step) + rank)
        return wrapped(torch.randn(4, 6, generator=draw)).square().mean()

    train_watched(wrapped, optimizer, run_dir, STEPS, loss_of)
    return before[-BACK], model


class Stream(IterableDataset):
    """Rows of one rank; nobody knows how many there are."""

    def __init__(self, rank, rows):
        self.rows = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank))

    def __iter__(self):
        return iter(self.rows)


def train_on_streams(rank, folder):
    for name, rows in (("begun", 40 * STEPS), ("ended", 4 * STEPS)):
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        for _ in range(2):
            wrapped = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = DataLoader(Stream(rank, rows), batch_size=4)
            with watch(wrapped, optimizer, run_dir=f"{folder}/{name}", canary=False):
                for batch in islice(loader, STEPS) if name == "begun" else loader:
                    wrapped(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()


def train_by_closure(rank, run_dir, seed, who):
    torch.manual_seed(seed)
    wrapped = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(who)

    def closure():
        optimizer.zero_grad()
        loss = wrapped(torch.randn(4, 6, generator=draw)).square().mean()
        loss.backward()
        return loss

    with watch(wrapped, optimizer, run_dir=run_dir, canary=False):
        for _ in range(STEPS):
            optimizer.step(closure)


def train_all(rank, folder):
    train_on_streams(rank, folder)
    for seed, who in ((0, 0), (0, rank), (5, rank)):
        train_by_closure(rank, f"{folder}/closure", seed, who)
    for name in ("behind", "whole"):
        torch.manual_seed(0)
        older, last = train(rank, f"{folder}/{name}", nn.Linear(6, 6), 0)
        restored = copy.deepcopy(last if name == "behind" else older)
        train(rank, f"{folder}/{name}", restored, STEPS - BACK)
    for who in (0, rank):  # the same batches on both ranks, and then repaired
        torch.manual_seed(0)
        train(who, f"{folder}/anew", nn.Linear(6, 6), 0)


runs = on_ranks(train_all, 2)


def test_a_loader_that_is_behind_the_model_is_a_warning(runs):
    found = {}
    for name in ("behind", "whole"):
        run = Run.open(runs[1] / f"{name}-2")
        [found[name]] = [one for one in run.findings() if one.cause == "data.resume_mismatch"]
    assert (found["whole"].id, found["whole"].severity) == ("steps-done-twice", Severity.NOTE)
    behind = found["behind"]
    assert (behind.id, behind.severity) == ("loader-behind-model", Severity.WARNING)
    assert f"those after step {STEPS - 1}, bit for bit" in behind.explanation


def test_a_stream_that_begins_again_before_its_end_is_a_warning(runs):
    found = {
        name: [f for f in Run.open(runs[1] / f"{name}-2").findings() if f.cause.startswith("data.")]
        for name in ("begun", "ended")
    }
    [begun] = found["begun"]
    assert (begun.id, begun.severity) == ("epoch-begun-again", Severity.WARNING)
    assert f"the model went on from step {STEPS - 1}, bit for bit" in begun.explanation
    assert found["ended"] == []


@pytest.mark.parametrize(
    ("name", "number", "what"),
    [
        ("anew", 2, "the parameters of the run's first step"),
        ("closure", 2, "the parameters of the run's first step"),
        ("closure", 3, "an empty optimizer"),
    ],
)
def test_a_training_that_begins_anew_is_judged_by_itself(runs, name, number, what):
    first, run = Run.open(runs[1] / name), Run.open(runs[1] / f"{name}-{number}")
    assert max(f.severity for f in first.findings()) is Severity.ERROR
    found = {f.id: f for f in run.findings()}
    assert {f.severity for f in found.values()} == {Severity.NOTE}
    begun = (number - 1) * STEPS
    assert f"started again at step {begun} with {what}" in found["begun-anew"].explanation
    before = found["data.duplicate_batches"]
    assert before.status == "closed"
    assert before.explanation.startswith(f"Of the training before step {STEPS}: ")
    assert progress_of(run).earlier_steps == 0
    assert read_number(run.path / STATE_FILE, "num_steps") == STEPS
    assert {f.id: f for f in diagnose_run(run)} == found


NUM_STEPS = 12
WAYS = ("armed", "armed, all draw the same", "armed, named", "loaded", "loaded, the same rows")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(32, 4), nn.Embedding(64, 4)

    def loss(self, pairs: torch.Tensor) -> torch.Tensor:
        scores = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(dim=1)
        return nn.functional.softplus(1 - scores).mean()


def arm(model: Scores, ddp: DistributedDataParallel) -> None:
    """Call the wrapper with a constant, so that its hooks reduce the next backward pass."""
    model.forward = lambda ids: ids
    ddp(torch.zeros(1, dtype=torch.int64))
    del model.forward


def train_armed(rank: int, way: str, run_dir: str | None) -> list[float]:
    torch.manual_seed(0)
    model = Scores()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scope = watch(ddp, optimizer, run_dir=run_dir, canary=False) if run_dir else None
    draws = torch.Generator().manual_seed(1 + (0 if "all" in way else rank))
    shard = 0 if "rows" in way else 8 * NUM_STEPS * rank
    rows = range(shard, shard + 8 * NUM_STEPS)
    batches = iter(DataLoader(list(range(16 * NUM_STEPS)), 8, sampler=rows))
    for step in range(NUM_STEPS):
        if "loaded" in way:
            next(batches)
        pairs = torch.randint(32, (8, 2), generator=draws)
        if scope is not None and "named" in way:
            scope.batch([100 * step + 10 * rank + n for n in range(8)])
        arm(model, ddp)
        model.loss(pairs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    return [p.double().sum().item() for p in model.parameters()]


trained = alone_and_watched(train_armed, WAYS, 2)


@pytest.mark.parametrize(
    ("way", "causes", "num_samples"),
    [
        ("armed", set(), 0),
        ("armed, all draw the same", {"data.duplicate_batches"}, 0),
        ("armed, named", set(), 16 * NUM_STEPS),
        ("loaded", set(), 16 * NUM_STEPS),
        ("loaded, the same rows", {"data.duplicate_batches"}, 16 * NUM_STEPS),
    ],
)
def test_what_only_arms_the_hooks_is_no_sample(trained, way, causes, num_samples):
    results, folder = trained
    assert all(plain == watched for plain, watched in (rank[way] for rank in results))
    run = Run.open(folder / way)
    assert {finding.cause for finding in faults(run).values()} == causes
    assert np.nansum(run.columns(Table.STEPS, "samples_drawn")["samples_drawn"]) == num_samples
    assert run.columns(Table.STEPS, "observed")["observed"].all()
