"""A model of many small parameters: the calls that read its gradients are as few as with few."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.gradients.sketch import MultiTensorReader, Sketcher
from support.ranks import on_ranks

pytestmark = [pytest.mark.ranks]

FEW, MANY = 20, 400
STEPS = 5


def make_model(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_layers)])


def train(model: nn.Module, rank: int, run_dir: str | None, *, zeroed: bool) -> list[Tensor]:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=zeroed)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    scope = None if run_dir is None else rankscope.watch(ddp, optimizer, run_dir=run_dir)
    for step in range(STEPS):
        inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroed)
    if scope is not None:
        scope.close()
    return [parameter.detach() for parameter in model.parameters()]


def count_calls(rank: int, folder: str) -> dict[bool, dict[str, Any]]:
    calls = {"prepared": 0, "read": 0}
    prepare, read = MultiTensorReader.__init__, Sketcher._measure

    def prepared(*args: Any, **options: Any) -> None:
        calls["prepared"] += 1
        prepare(*args, **options)

    def counted(*args: Any, **options: Any) -> None:
        calls["read"] += 1
        read(*args, **options)

    MultiTensorReader.__init__, Sketcher._measure = prepared, counted
    found: dict[bool, dict[str, Any]] = {way: {"counts": [], "same": []} for way in (False, True)}
    for zeroed, number in itertools.product(found, (FEW, MANY)):
        calls.update(prepared=0, read=0)
        model = make_model(number)
        alone = train(copy.deepcopy(model), rank, None, zeroed=zeroed)
        watched = train(model, rank, f"{folder}/{number} {zeroed}", zeroed=zeroed)
        found[zeroed]["counts"].append(dict(calls))
        found[zeroed]["same"].append(all(map(torch.equal, alone, watched)))
    return found


counted = on_ranks(count_calls, 2)


@pytest.mark.parametrize("zeroed", [False, True], ids=["made anew", "zeroed in their buckets"])
def test_many_small_gradients_are_read_in_as_few_calls_as_few(counted, zeroed):
    for found in (rank[zeroed] for rank in counted[0]):
        few, many = found["counts"]
        assert few["read"] > STEPS
        assert many == few
        assert found["same"] == [True, True]
