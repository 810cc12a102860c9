from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.evidence import Table
from support.ddp import gather_rows
from support.fixed_order import in_order, rounded
from support.fsdp2_modes import make_batches, make_net, mode_named
from support.fsdp2_training import local_gradient, optimize, start, train_step
from support.ranks import run_ranks
from support.releases import SINCE_TORCH_2_13, SINCE_TORCH_2_15

pytestmark = pytest.mark.ranks

STEPS = 3


def _divided(factor, *, forced):
    def finish(model):
        for module in [model, *model.blocks]:
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(forced)
        return model

    return finish


def _separate_group(model):
    model.set_separate_reduce_scatter_group(True)
    return model


_IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
FSDP2 = {
    "fp32": mode_named("1-D"),
    "accumulated": mode_named("accumulated"),
    "frozen in part": mode_named("frozen in part"),
    "16 bits in fp32": mode_named("bf16 reduced in fp32"),
    "fp16": mode_named("fp16"),
    "bf16 by default": replace(mode_named("1-D"), options={"mp_policy": _IN_BF16}),
    "multiplied before": replace(mode_named("1-D"), finish=_divided(2.5, forced=False)),
    "divided after": replace(mode_named("1-D"), finish=_divided(2.5, forced=True)),
}
if SINCE_TORCH_2_13:
    FSDP2["another group"] = replace(mode_named("1-D"), finish=_separate_group)
TWO_REPLICAS = {"HSDP": mode_named("HSDP"), "HSDP half reduced": mode_named("HSDP half reduced")}


def reduced_by_name(session):
    named = session.model.named_parameters()
    return {n: p.grad.full_tensor().numpy().ravel() for n, p in named if p.grad is not None}


def reduce_fsdp2(rank, mode):
    session = start(mode)
    rankscope.fixed_order(session.model)
    rankscope.fixed_order(session.model)
    train_step(session, 0)
    optimize(session)
    local, _ = local_gradient(session, 1)
    local_WP = {name: gather_rows(part.float().flatten()) for name, part in local.items()}
    train_step(session, 1)
    return {"local": local_WP, "reduced": reduced_by_name(session)}


def reduce_fsdp2_in_all_modes(rank, names):
    modes = {**FSDP2, **TWO_REPLICAS}
    return {name: reduce_fsdp2(rank, modes[name]) for name in names}


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(reduce_fsdp2_in_all_modes, 3, list(FSDP2))


@pytest.fixture(scope="module")
def in_four():
    return run_ranks(reduce_fsdp2_in_all_modes, 4, list(TWO_REPLICAS))


def expected_mean(name, local_WP):
    if name == "fp16":
        before = 2  # what FSDP2 divides gradients of three by before their sum; then by the rest
        total = rounded(in_order(rounded(local_WP / np.float32(before), "fp16"), 1), "fp16")
        return rounded(total / np.float32(len(local_WP) / before), "fp16")
    divisor = 2.5 if name in ("multiplied before", "divided after") else None
    in_bf16 = name == "bf16 by default" and not SINCE_TORCH_2_15
    return rounded(in_order(local_WP, divisor), "bf16" if in_bf16 else "")


class TestFSDP2:
    @pytest.mark.parametrize("name", FSDP2)
    def test_the_mean_is_the_sum_in_rank_order_divided_as_fsdp2_does(self, sharded, name):
        for rank in sharded:
            result = rank[name]
            assert result["reduced"].keys() == result["local"].keys()
            for parameter, local_WP in result["local"].items():
                expected = expected_mean(name, local_WP)
                assert np.array_equal(result["reduced"][parameter], expected), parameter

    def test_two_replicas_are_two_sums_in_order_whose_mean_has_one_order(self, in_four):
        for rank in in_four:
            result = rank["HSDP"]
            for parameter, local_WP in result["local"].items():
                expected = in_order(np.stack([in_order(local_WP[:2]), in_order(local_WP[2:])]))
                assert np.array_equal(result["reduced"][parameter], expected), parameter

    @pytest.mark.parametrize("name", TWO_REPLICAS)
    def test_two_replicas_hold_the_mean(self, in_four, name):
        for rank in in_four:
            for parameter, local_WP in rank[name]["local"].items():
                mean = local_WP.astype(np.float64).mean(axis=0)
                found = rank[name]["reduced"][parameter]
                np.testing.assert_allclose(found, mean, rtol=1e-4, atol=1e-7)


def train_both(rank, run_dir):
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=0.01)
    rankscope.fixed_order(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(STEPS):
        [(ids, labels)] = make_batches(rank, step, 1)
        ddp(ids, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = {"DDP": {n: p.detach().numpy().tobytes() for n, p in ddp.module.named_parameters()}}
    for name, options in {"FSDP2": None, "watched": {"reduced": "sketch"}}.items():
        session = start(mode_named("1-D"))
        rankscope.fixed_order(session.model)
        scope = None
        if options is not None:
            scope = rankscope.watch(
                session.model, session.optimizer, run_dir=run_dir, overhead_budget=None, **options
            )
        for step in range(STEPS):
            train_step(session, step)
            optimize(session)
        if scope is not None:
            scope.close()
        named = session.model.named_parameters()
        ends[name] = {n: p.detach().full_tensor().numpy().tobytes() for n, p in named}
    return ends


def test_fsdp2_ends_with_the_bits_of_ddp(tmp_path):
    for ends in run_ranks(train_both, 3, str(tmp_path / "run")):
        assert ends["DDP"] == ends["FSDP2"] == ends["watched"]
    rows = rankscope.Run.open(tmp_path / "run").table(Table.STEPS).to_pylist()
    assert len(rows) == STEPS
    assert all(0 < row["reduction_residual"] < 5e-7 for row in rows)
