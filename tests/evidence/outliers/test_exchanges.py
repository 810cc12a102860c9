"""Forward passes that exchange tensors among workers, as context parallelism does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.bus.probe import StepEnd
from rankscope.evidence.outliers import EXCHANGES
from rankscope.evidence.outliers.probe import ExchangeProbe
from support.loops import train_watched
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 60
END = StepEnd(0, True, frozenset(), 1)


class Gathered(Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Model(nn.Module):
    def __init__(self, gathers):
        super().__init__()
        self.words, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gathers = gathers

    def forward(self, tokens):
        hidden = self.norm(self.words(tokens))
        keys = Gathered.apply(hidden) if self.gathers else hidden
        return self.mix(hidden + keys.mean(1, keepdim=True)).square().mean()


def train(rank, run_dir, gathers):
    torch.manual_seed(0)
    model = Model(gathers)
    fully_shard(model.mix)
    fully_shard(model)  # which gathers parameters, and that is no exchange
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)
    original = ProcessGroup.allgather

    def loss_of(step):
        loss = model(torch.randint(9, (4, 8)))
        assert ProcessGroup.allgather is original
        return (1 + rank) * loss  # parts of a sequence differ in kind

    train_watched(model, optimizer, run_dir, STEPS, loss_of)


def train_all(rank, folder):
    for gathers in (False, True):
        train(rank, f"{folder}/{gathers}", gathers)


def test_workers_that_exchange_tensors_in_the_forward_pass_may_differ_on_purpose(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    for gathers in (False, True):
        run = Run.open(tmp_path / f"{gathers}")
        [found] = [one for one in run.findings() if one.id == "workers-differ"]
        assert found.severity is (Severity.NOTE if gathers else Severity.WARNING)
        assert ("exchanges tensors among them (all-gather)" in found.explanation) == gathers
        kinds = run.columns(Table.DIGESTS, "kind")["kind"]
        assert ("exchanged" in kinds) == gathers


def exchange(rank, folder):
    """Note what is found of some operations, each in a forward pass of its own."""
    half = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(3)][rank]
    source, target = torch.ones(6, 2, 4), torch.empty(6, 2, 4)
    uneven = [1, 2, 3]
    took = [uneven[rank]] * 3
    operations = {
        "even": lambda: dist.all_to_all_single(target, source),
        "uneven": lambda: dist.all_to_all_single(
            torch.empty(sum(took), 2, 4), source, took, uneven
        ),
        "sum": lambda: dist.all_reduce(source),
        "rows": lambda: dist.all_gather(list(target[:3]), source[0]),
        "alone": lambda: dist.all_gather([target], source, group=alone),
        "ring": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, source, (rank + 1) % 3),
                    dist.P2POp(dist.irecv, target, (rank - 1) % 3),
                ]
            )
        ],
        "half": lambda: rank < 2 and dist.all_gather([target, target], source, group=half),
    }  # fmt: skip
    found = {}
    for name, operation in operations.items():
        probe = ExchangeProbe(frozenset(range(3)), 0)
        probe.begin_step(0, paused=False)
        probe.before_forward(0, first=True)
        operation()
        probe.after_forward()
        pending = probe.collect(END)
        found[name] = {} if pending is None else pending.read().names[EXCHANGES]["exchanged"]
    nothing = {"uneven": {}, "sum": {}, "rows": {}, "alone": {}}
    expected = {
        **nothing,
        "even": {"all-to-all": 1},
        "ring": {"send": 1},
        "half": {"all-gather": 1} if rank < 2 else {},
    }
    assert found == expected, found


def test_sums_rows_of_samples_and_tokens_for_experts_are_no_exchange_of_parts(tmp_path):
    run_ranks(exchange, 3, str(tmp_path))
