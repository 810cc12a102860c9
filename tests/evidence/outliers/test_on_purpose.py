import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd as gather_with_gradient,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.bus.probe import StepEnd
from rankscope.evidence.outliers import EXCHANGES
from rankscope.evidence.outliers.probe import ExchangeProbe
from support.loops import train_watched
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks

LENGTH, STEPS = 16, 40


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


class Mixing(nn.Module):
    """Mixes the tokens of its own part of a sequence, or of the whole, as context parallelism."""

    def __init__(self, gathers):
        super().__init__()
        self.words, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gathers = gathers

    def forward(self, tokens):
        hidden = self.norm(self.words(tokens))
        keys = Gathered.apply(hidden) if self.gathers else hidden
        return self.mix(hidden + keys.mean(1, keepdim=True)).square().mean()


def mixing(rank, *, on_purpose):
    model = Mixing(on_purpose)
    fully_shard(model.mix)
    fully_shard(model)  # which gathers parameters, and that is no exchange
    original = ProcessGroup.allgather

    def loss_of(step):
        loss = model(torch.randint(9, (4, LENGTH // 2)))
        assert ProcessGroup.allgather is original
        return loss

    return model, loss_of


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(LENGTH, 4)

    def forward(self, tokens, places):
        return (self.words(tokens) + self.places(places)).square().mean()


def placed(rank, *, on_purpose):
    model = DistributedDataParallel(Placed())

    def loss_of(step):
        places = torch.arange(LENGTH).chunk(2)[rank].roll(0 if on_purpose else step)
        return model(torch.randint(9, (4, LENGTH // 2)), places.expand(4, -1))

    return model, loss_of


CASES = {
    "mixing": (mixing, "exchanges tensors among them (all-gather)", "exchanged"),
    "placed": (placed, "an input of its own that stays the same", "constant"),
}
ROWS = {"exchanged": {"forward: all-gather"}, "constant": {"inputs: number 1"}}


def train_all(rank, folder):
    for name, (make, *_) in CASES.items():
        for on_purpose in (False, True):
            torch.manual_seed(0)
            model, loss_of = make(rank, on_purpose=on_purpose)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            torch.manual_seed(1 + rank)

            def loss_of_part(step, loss_of=loss_of):
                return (1 + rank) * loss_of(step)  # parts differ in kind

            train_watched(model, optimizer, f"{folder}/{name}-{on_purpose}", STEPS, loss_of_part)


runs = on_ranks(train_all, 2)


@pytest.mark.parametrize("on_purpose", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_workers_that_differ_on_purpose_are_a_note(runs, name, on_purpose):
    _, words, kind = CASES[name]
    run = Run.open(runs[1] / f"{name}-{on_purpose}")
    [found] = [one for one in run.findings() if one.id == "workers-differ"]
    assert found.severity is (Severity.NOTE if on_purpose else Severity.WARNING)
    assert (words in found.explanation) == on_purpose
    rows = run.columns(Table.DIGESTS, "kind", "name")
    named = {name for name, each in zip(rows["name"], rows["kind"], strict=True) if each == kind}
    assert named == (ROWS[kind] if on_purpose else set())


def exchange(rank, folder):
    """Note what is found of some operations, each in a forward pass of its own."""
    half = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(3)][rank]
    source, target = torch.ones(6, 2, 4), torch.empty(6, 2, 4)
    uneven, uneven_target = [1, 2, 3], torch.empty(3 * (rank + 1), 2, 4)
    took = [rank + 1] * 3
    sends = dist.P2POp(dist.isend, source, (rank + 1) % 3)
    ring = [sends, dist.P2POp(dist.irecv, target, (rank - 1) % 3)]
    operations = {
        "even": lambda: dist.all_to_all_single(target, source),
        "uneven": lambda: dist.all_to_all_single(uneven_target, source, took, uneven),
        "sum": lambda: dist.all_reduce(source),
        "rows": lambda: dist.all_gather(list(target[:3]), source[0]),
        "alone": lambda: dist.all_gather([target], source, group=alone),
        "ring": lambda: [work.wait() for work in dist.batch_isend_irecv(ring)],
        "functional": lambda: gather_with_gradient(source, 0, dist.group.WORLD),
        "half": lambda: rank < 2 and dist.all_gather([target, target], source, group=half),
    }
    found = {}
    for name, operation in operations.items():
        probe = ExchangeProbe(frozenset(range(3)), 0)
        probe.begin_step(0, paused=False)
        probe.before_forward(0, first=True)
        operation()
        probe.after_forward()
        pending = probe.collect(StepEnd(0, True, frozenset(), 1))
        found[name] = {} if pending is None else pending.read().names[EXCHANGES]["exchanged"]
    expected = {name: {} for name in operations}
    expected |= {"even": {"all-to-all": 1}, "ring": {"send": 1}, "functional": {"all-gather": 1}}
    expected["half"] = {"all-gather": 1} if rank < 2 else {}
    assert found == expected, found


def test_sums_rows_of_samples_and_tokens_for_experts_are_no_exchange_of_parts(tmp_path):
    run_ranks(exchange, 3, str(tmp_path))
