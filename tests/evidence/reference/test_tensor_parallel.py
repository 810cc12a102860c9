"""Parts of tensors and replicas of parameters, on real ranks, against torch's own layouts."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.layout import layout_of, local_of, part_in, whole_of
from rankscope.evidence.reference.tensor_parallel import TensorParallel
from support.ranks import run_ranks

SHAPES = [(7, 5), (2, 4), (3, 3), (1, 6)]


def cut(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for shape in SHAPES:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
            spread = distribute_tensor(whole, mesh, [placement])
            assert torch.equal(part_in(layout_of(spread), whole), local_of(spread))
            assert torch.equal(whole_of(spread), whole)
    assert part_in(layout_of(whole), whole) is whole
    with pytest.raises(CanaryDeclined, match="not by parts"):
        part_in((mesh, (Partial(),)), whole)


@pytest.mark.ranks
def test_parts_are_those_that_torch_gives_each_rank():
    run_ranks(cut, 3)


def meet(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    shared = TensorParallel(mesh, "tp", {"cut": Shard(0), "norm": Replicate()})
    for dtype in (torch.float32, torch.bfloat16):
        same = torch.randn(999, generator=torch.Generator().manual_seed(0)).to(dtype)
        middle = shared.middle_of("norm", same)
        assert torch.equal(middle.view(torch.uint8), same.view(torch.uint8))
    own = torch.tensor([1.0, -2.0]) + rank
    assert shared.middle_of("norm", own).tolist() == [2.0, -1.0]
    assert shared.middle_of("cut", own) is own
    sketches = torch.full((2, 4), rank + 1.0)
    summed = shared.sum_replicas(["cut", "hand-made"], sketches)
    assert summed.tolist() == [[0.0] * 4, [6.0] * 4]
    assert (sketches == rank + 1).all()


@pytest.mark.ranks
def test_replicas_meet_in_their_middle():
    run_ranks(meet, 3)


def move(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shared = TensorParallel(mesh, "tp", {})
    for dtype in (torch.float32, torch.bfloat16):
        for coarsest in (torch.float32, torch.bfloat16):
            parameter = torch.nn.Parameter(torch.randn(4096).to(dtype))
            state = torch.get_rng_state()
            before = parameter.detach().double()
            shared.disturb([parameter], coarsest)
            moves = (parameter.detach().double() - before) / before
            eps = max(torch.finfo(dtype).eps, torch.finfo(coarsest).eps)
            assert moves.abs().max() <= 2.01 * eps  # a move is rounded as well
            assert 0.2 < (moves != 0).double().mean() < 0.3
            assert torch.equal(torch.get_rng_state(), state)
    shared.replicas[parameter] = torch.zeros(4096, dtype=dtype)
    shared.disturb([parameter], torch.float32)
    assert not parameter.any()


@pytest.mark.ranks
def test_a_quarter_of_a_parameter_moves_by_a_rounding_from_this_ranks_replica():
    run_ranks(move, 2)
