"""Inner products and reduced gradients of the exact tier, against whole gradients in float64."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rankscope.core.direction import cosines_from_gram, gram, sum_shares
from rankscope.reduce.exact import ExactGram, pack_share
from support.exact import (
    PLAIN,
    SMALL_BUCKETS,
    flat_gradient,
    gather_gram,
    gather_rows,
    local_gradient,
    make_ddp,
    unguarded,
    watch_gradients,
)
from support.models import make_batch, make_model
from support.modes import MODES, Mode, train_step
from support.ranks import run_ranks

STEPS = 4
# In the first step of a static graph DDP numbers its buckets in another way.
MANY_STATIC = Mode("static graph, small buckets", {"static_graph": True, "bucket_cap_mb": 0.001})
ALL_MODES = [*MODES, MANY_STATIC]


def train_in_mode(rank: int, mode: Mode) -> list[dict[str, Any]]:
    model, ddp, optimizer = make_ddp(mode)
    exact = ExactGram.register(ddp, unguarded)
    reduced = watch_gradients(optimizer, model)
    steps = []
    for step in range(STEPS):
        local = local_gradient(rank, mode, step, model)
        train_step(rank, mode, step, ddp, optimizer)
        local_WP = gather_rows(local.double())
        steps.append({"local": local_WP, "gram": gather_gram(exact), "reduced": reduced[step]})
    return steps


def train_in_all_modes(rank: int) -> dict[str, list[dict[str, Any]]]:
    return {mode.name: train_in_mode(rank, mode) for mode in ALL_MODES}


@pytest.fixture(scope="module", params=[2, 3])
def trained(request):
    return run_ranks(train_in_all_modes, request.param)


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name)
@pytest.mark.ranks
class TestInEveryMode:
    def test_inner_products_and_cosines_are_exact(self, trained, mode):
        for step in trained[0][mode.name]:
            exact_WW = gram(step["local"])
            norms_W = np.sqrt(exact_WW.diagonal())
            np.testing.assert_allclose(
                step["gram"] / np.outer(norms_W, norms_W), cosines_from_gram(exact_WW), atol=1e-6
            )
            np.testing.assert_allclose(
                cosines_from_gram(step["gram"]), cosines_from_gram(exact_WW), atol=1e-6
            )

    def test_the_reduced_gradient_is_the_sum_in_rank_order(self, trained, mode):
        for step in trained[0][mode.name]:
            local_WP = step["local"].astype(np.float32)
            total_P = local_WP[0]
            for row_P in local_WP[1:]:
                total_P = total_P + row_P
            mean_P = total_P / np.float32(len(local_WP))
            assert np.array_equal(step["reduced"], mean_P)

    def test_every_rank_holds_the_same_bits(self, trained, mode):
        for rank in trained[1:]:
            for step, first in zip(rank[mode.name], trained[0][mode.name], strict=True):
                assert step["reduced"].tobytes() == first["reduced"].tobytes()
                assert step["gram"].tobytes() == first["gram"].tobytes()


def poison(rank: int) -> list[dict[str, Any]]:
    """Put an infinity, then a NaN, into one element of rank 1's gradient."""
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)
    exact = ExactGram.register(ddp, unguarded)
    reduced = watch_gradients(optimizer, model)
    results = []
    for step, value in enumerate([float("inf"), float("nan")]):
        batch = make_batch(rank, step)
        ddp(**batch)["loss"].backward()
        clean, clean_WW = flat_gradient(model).numpy(), gather_gram(exact)
        optimizer.zero_grad()
        handle = model.head.bias.register_hook(
            lambda gradient, value=value: (
                gradient.index_fill(0, torch.tensor([3]), value) if rank == 1 else gradient
            )
        )
        ddp(**batch)["loss"].backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        results.append(
            {
                "clean": clean,
                "clean_WW": clean_WW,
                "gram": gather_gram(exact),
                "reduced": reduced[step],
            }
        )
        model.load_state_dict(make_model(dropout=0.0).state_dict())
        optimizer.state.clear()
    return results


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_has_no_inner_products():
    row_and_column = [[False, True, False], [True, True, True], [False, True, False]]
    for result in run_ranks(poison, 3)[0]:
        assert np.array_equal(np.isnan(result["gram"]), row_and_column)
        others = np.where(row_and_column, np.nan, result["clean_WW"])
        np.testing.assert_allclose(result["gram"], others, rtol=1e-12)
        poisoned = ~np.isfinite(result["reduced"])
        assert poisoned.sum() == 1
        assert np.array_equal(result["reduced"][~poisoned], result["clean"][~poisoned])


class TwoDtypes(nn.Module):
    """A layer in fp32, then one in bf16 that is used twice, under activation checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 9).bfloat16()
        self.reentrant = reentrant

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values).bfloat16()
        for _ in range(2):
            hidden = checkpoint(self.second, hidden, use_reentrant=self.reentrant)
        return hidden.float().square().mean()


def train_two_dtypes(rank: int, reentrant: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = TwoDtypes(reentrant=reentrant)
    ddp = DistributedDataParallel(model, static_graph=True)
    exact = ExactGram.register(ddp, unguarded)
    steps = []
    for _ in range(STEPS):
        values = torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))
        alone = copy.deepcopy(model)
        alone(values).backward()
        ddp(values).backward()
        local_WP = gather_rows(flat_gradient(alone).double())
        reduced = flat_gradient(model).numpy()
        steps.append({"local": local_WP, "gram": gather_gram(exact), "reduced": reduced})
        model.zero_grad()
    return steps


@pytest.mark.ranks
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_dtypes_and_activation_checkpointing(reentrant):
    for step in run_ranks(train_two_dtypes, 2, reentrant)[0]:
        np.testing.assert_allclose(step["gram"], gram(step["local"]), rtol=1e-12)
        mean_P = step["local"].mean(axis=0)
        np.testing.assert_allclose(step["reduced"], mean_P, rtol=2**-8, atol=1e-12)


def run_out_of_data(rank: int) -> list[np.ndarray]:
    """Give rank 0 two batches more than rank 1."""
    _, ddp, optimizer = make_ddp(PLAIN)
    exact = ExactGram.register(ddp, unguarded)
    shares = []
    with ddp.join():
        for step in range(4 if rank == 0 else 2):
            ddp(**make_batch(rank, step))["loss"].backward()
            share = exact.take_gram()
            assert share is not None
            shares.append(share.numpy())
            optimizer.step()
            optimizer.zero_grad()
    return shares


@pytest.mark.ranks
def test_a_rank_that_ran_out_of_data_counts_as_zero():
    shares = run_ranks(run_out_of_data, 2)[0]
    assert [np.count_nonzero(share) for share in shares] == [4, 4, 1, 1]


def test_shares_add_up_to_the_gram_matrix():
    gradients_WN = torch.randn(3, 40, dtype=torch.float64)
    shares = [part @ part.T for part in gradients_WN.split([10, 25, 5], dim=1)]
    packed_WT = torch.stack([pack_share(share) for share in shares]).numpy()
    np.testing.assert_allclose(sum_shares(packed_WT), gram(gradients_WN.numpy()), rtol=1e-12)
