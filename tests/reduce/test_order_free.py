import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.evidence import Table
from rankscope.lab.reductions import reduction
from rankscope.lab.reductions.accumulator import Accumulator
from rankscope.lab.reductions.order_free import order_free
from support.comm_hooks import register_comm_hook
from support.order_free import MICRO_BATCHES, STEPS, Case, Trained, digest, make_micro_batch, train
from support.ranks import run_ranks

VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 0.001}
UNUSED = {"find_unused_parameters": True}

SAME = [  # all of these end like "plain"
    Case("plain", {}),
    Case("small buckets", SMALL),
    Case("views zeroed in place", VIEWS, zero_in_place=True),
    Case("backwards", {}, reverse=True),
    Case("thrown away in place", VIEWS, discard="zero_grad", zero_in_place=True),
    Case("raised, views in place", VIEWS, discard="raises", zero_in_place=True),
]
OTHERS = [
    Case("channels last", SMALL, model="convolution"),
    Case("used once, views", {**UNUSED, **VIEWS}, model="branch"),
    Case("bfloat16", {}, dtype=torch.bfloat16),
    Case("workers", {}, average="workers"),
    Case("everything reentrant", {}, model="everything reentrant"),
    Case("scaler", {}, scaler=True),
]
STATIC = [  # DDP wants no no_sync in the first step of a static graph
    Case("static graph", {"static_graph": True})
]
PLAIN_DDP = Case("plain DDP", {}, average="")


@pytest.fixture(scope="module")
def ends() -> dict[int, list[dict[str, tuple[str, str]]]]:
    cases = [*SAME, *OTHERS, PLAIN_DDP]
    static = {4: STATIC}
    return {n: run_ranks(train, n, [*cases, *static.get(n, [])]) for n in (1, 2, 4)}


@pytest.mark.ranks
class TestBits:
    @pytest.mark.parametrize("case", [*SAME, *OTHERS], ids=lambda case: case.name)
    def test_are_the_same_for_1_2_and_4_workers(self, ends, case):
        assert len({rank[case.name] for ranks in ends.values() for rank in ranks}) == 1

    @pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
    def test_do_not_depend_on_how_ddp_is_used(self, ends, case):
        assert ends[2][0][case.name] == ends[2][0]["plain"]

    def test_are_the_same_with_a_static_graph(self, ends):
        assert all(rank["static graph"] == ends[1][0]["plain"] for rank in ends[4])

    def test_of_plain_ddp_differ(self, ends):
        assert len({ends[w][0]["plain DDP"] for w in ends}) > 1


def reduce_by_hand(rank: int) -> None:
    """Hold a step's gradient against one accumulator for all micro-batches."""
    trained = Trained(rank, Case("by hand", {"bucket_cap_mb": 0.001}))
    alone = copy.deepcopy(trained.model)
    sums = [Accumulator.zeros(p.numel()) for p in alone.parameters()]
    tokens = 0
    for step in range(2):
        alone.load_state_dict(trained.model.state_dict())
        for each in sums:
            each.clear()
        batches = [make_micro_batch(step, micro) for micro in range(MICRO_BATCHES)]
        tokens = sum(batch["labels"].numel() for batch in batches)
        for batch in batches:
            alone.zero_grad()
            (alone(**batch)["loss"] * (batch["labels"].numel() / tokens)).backward()
            for parameter, each in zip(alone.parameters(), sums, strict=True):
                assert parameter.grad is not None
                each.deposit(parameter.grad)
        trained.step(step)
        for gradient, each in zip(trained.gradients, sums, strict=True):
            assert torch.equal(gradient.flatten(), each.value())


@pytest.mark.ranks
def test_the_gradient_is_the_sum_of_all_micro_batches_rounded_once():
    run_ranks(reduce_by_hand, 2)


def scatter(rank: int) -> list[bytes]:
    """Reduce by an all-to-all, and as accelerators do, over sizes that W does not divide."""
    group = dist.group.WORLD
    results = []
    for on_cpu in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            sums = reduction.DigitSums(group, torch.device("cpu"))
            sums._on_cpu = on_cpu
            accumulators = [Accumulator.zeros(n) for n in (5, 1, 0, 4)]
            random = torch.Generator().manual_seed(rank)
            for each in accumulators[:3]:
                each.deposit(torch.randn(len(each.digits), generator=random))
            if rank == 1:
                accumulators[0].deposit(torch.tensor([1.0, 2.0, 3.0, 4.0, math.inf]))
            arena = reduction.Arena(accumulators, group.size())
            exchange = sums.start(torch.full((10,), 9.0, dtype=dtype), arena, 1)
            sums.finish(exchange)
            results.append(bytes(exchange.result.wait().view(torch.uint8).numpy()))
    return results


@pytest.mark.ranks
def test_a_reduce_scatter_gives_the_same_bits_as_an_all_to_all():
    ranks = run_ranks(scatter, 3)
    for results in ranks:
        assert results == ranks[0]
        assert results[:2] == results[2:]
    values = np.frombuffer(ranks[0][0], np.float32)
    assert np.isinf(values[:5]).all()
    assert np.isfinite(values[5:]).all()
    assert (values[6:] == 0).all()


def refusals(rank: int) -> None:

    def expect(words: str, act: Any, error: type[Exception] = rankscope.errors.UnsupportedError):
        with pytest.raises(error, match=words):
            act()

    linear = nn.Linear(2, 2)
    expect("got Linear", lambda: order_free(linear))
    ddp = DistributedDataParallel(linear)
    expect("'workers', 'sum'", lambda: order_free(ddp, average="mean"), rankscope.errors.UsageError)
    order_free(ddp)
    expect("order_free", lambda: order_free(ddp))
    expect("hook", lambda: rankscope.fixed_order(ddp))
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    register_comm_hook(hooked, "all-reduce")
    expect("hook of its own", lambda: order_free(hooked))
    fixed = DistributedDataParallel(nn.Linear(2, 2))
    rankscope.fixed_order(fixed)
    expect("fixed_order", lambda: order_free(fixed))
    sparse = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    expect("sparse", lambda: order_free(sparse))
    numbers = DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))
    expect("complex", lambda: order_free(numbers))

    def accumulate_without_no_sync() -> None:
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()

    expect("zero_grad", accumulate_without_no_sync)
    second = DistributedDataParallel(nn.Linear(2, 2))
    order_free(second)
    expect("create_graph", lambda: second(torch.ones(1, 2)).sum().backward(create_graph=True))
    copy.deepcopy(second)(torch.ones(1, 2)).sum().backward()  # its gradients are its own


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_cannot_work_is_refused_in_a_sentence():
    run_ranks(refusals, 1)


def watch_it(rank: int, case: Case, first: str, tier: str, folder: str) -> tuple[str, list[float]]:
    reduced = "norm" if tier == "scalars" else "sketch"
    options: dict[str, Any] = {"tier": tier, "reduced": reduced, "overhead_budget": None}
    trained = Trained(rank, case if first == "order_free" else Case("", {}, average=""))
    scope = rankscope.watch(trained.ddp, trained.optimizer, run_dir=folder, **options)
    if first == "watch":
        order_free(trained.ddp, average=case.average)
        trained.case, trained.factor = case, 1.0
    norms = []
    for step in range(STEPS):
        trained.step(step)
        whole = torch.cat([gradient.flatten() for gradient in trained.gradients])
        norms.append(whole.double().norm().item())
    scope.close()
    return digest(trained.model.parameters()), norms


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "first", "tier"),
    [(2, "order_free", "sketch"), (2, "watch", "sketch"), (4, "watch", "scalars")],
)
def test_watch_reads_what_is_taken_away(ends, tmp_path, num_ranks, first, tier):
    ranks = run_ranks(watch_it, num_ranks, Case("plain", {}), first, tier, str(tmp_path / "run"))
    assert {rank[0] for rank in ranks} == {ends[1][0]["plain"][1]}
    run = rankscope.Run.open(tmp_path / "run")
    steps = run.columns(Table.STEPS, "grad_norm_reduced", "reduction_residual")
    scale = run.per_worker("grad_scale")[1].mean(axis=1)  # each worker's follows its tokens
    # the sum over workers is recorded as the mean of what they contribute, like the loss
    expected = np.array(ranks[0][1]) / num_ranks / scale
    np.testing.assert_allclose(steps["grad_norm_reduced"], expected, rtol=1e-5)
    assert (run.per_worker("grad_norm_estimated")[1] == (num_ranks < MICRO_BATCHES)).all()
    if tier == "sketch":
        assert (steps["reduction_residual"] < 1e-5).all()
    assert all(finding.severity != "error" for finding in run.findings())
