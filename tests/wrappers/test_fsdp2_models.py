"""Models beyond the usual ones: shared, unused and ignored parameters, several roots, compiled."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from rankscope.wrappers.fsdp2_model import fsdp2_parameters, fsdp2_process_group, is_fsdp2
from support.fsdp2_modes import Block, Net, make_batches, make_net
from support.fsdp2_training import EXACT, check, gradients, make_tap, norm_error, session_of
from support.releases import SINCE_TORCH_2_13
from support.scenarios import run_scenarios

pytestmark = pytest.mark.ranks


def check_two_steps(model: Any, alone: nn.Module, *, copies: int = 1) -> None:
    """Train a sharded model beside an unsharded copy of it."""
    session = session_of(model)
    tap = make_tap(session)
    for step in range(2):
        for each in (model, alone):
            each.zero_grad()
        batch = make_batches(session.worker, step, 1)[0]
        alone(*batch).backward()
        tap.begin_forward(measure=True)
        model(*batch).backward()
        local = check(tap, gradients(alone), copies=copies)
        assert norm_error(local, gradients(alone)) < EXACT
    tap.remove()


def tied_weights() -> None:
    net = make_net()
    net.head.weight = net.embedding.weight
    alone = copy.deepcopy(net)
    fully_shard(net.blocks[0])
    fully_shard(net)
    assert "head.weight" not in fsdp2_parameters(net)
    check_two_steps(net, alone)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = make_net(), make_net()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.left(ids, labels) + 2 * self.right(labels, ids)
        return loss


def two_roots_in_a_plain_module() -> None:
    towers = TwoTowers()
    alone = copy.deepcopy(towers)
    fully_shard(towers.left.blocks[0])
    fully_shard(towers.left)
    fully_shard(towers.right)
    assert is_fsdp2(towers)
    check_two_steps(towers, alone)


class Spare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = Block(50)


def unused_parameters() -> None:
    for reduce_zeros in (False, True) if SINCE_TORCH_2_13 else (None,):
        torch.manual_seed(0)
        net: Any = Spare()
        alone = copy.deepcopy(net)
        fully_shard(net.spare)
        fully_shard(net)
        if reduce_zeros is not None:
            net.set_reduce_scatter_unused_params(reduce_zeros)
        check_two_steps(net, alone)


def ignored_parameters_are_left_out() -> None:
    net = make_net()
    alone = copy.deepcopy(net)
    alone.gate.requires_grad_(False)
    fully_shard(net, ignored_params=set(net.gate.parameters()))
    assert [name for name in fsdp2_parameters(net) if name.startswith("gate")] == []
    check_two_steps(net, alone)


def replicated_by_fsdp2() -> None:
    net = make_net()
    alone = copy.deepcopy(net)
    replicate(net.blocks[0])
    replicate(net)
    assert fsdp2_process_group(net).size() == dist.get_world_size()
    assert make_tap(session_of(net)).reduced_copies == dist.get_world_size()
    check_two_steps(net, alone, copies=dist.get_world_size())


def compiled_autograd() -> None:
    net = make_net()
    alone = copy.deepcopy(net)
    fully_shard(net.blocks[0])
    fully_shard(net)
    with torch._dynamo.config.patch(compiled_autograd=True):
        check_two_steps(torch.compile(net, backend="aot_eager"), alone)


SCENARIOS = [
    tied_weights,
    two_roots_in_a_plain_module,
    unused_parameters,
    ignored_parameters_are_left_out,
    replicated_by_fsdp2,
    compiled_autograd,
]


@pytest.fixture(scope="module")
def problems():
    return run_scenarios(SCENARIOS, 2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(problems, scenario):
    assert problems[scenario.__name__] == ""
