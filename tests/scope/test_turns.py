"""When the monitor's thread works: as soon as the training is about to wait itself."""

import pytest
import torch

from support.loops import Loop
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def turns_of_a_step(rank, run_dir):
    """Return what was so when the monitor's thread had its turn, in a step."""
    loop = Loop(rank, run_dir)
    loop.step(0)
    moments = []

    def take_turn():
        moments.append([parameter.grad.clone() for parameter in loop.model.parameters()])

    loop.scope._courier.take_turn = take_turn
    loss = loop.forward(1)
    turns_in_forward = len(moments)
    loss.backward()
    reduced = [parameter.grad.clone() for parameter in loop.model.parameters()]
    [local] = moments
    local_norm = torch.cat([gradient.double().flatten() for gradient in local]).norm().item()
    alike = [torch.equal(one, other) for one, other in zip(local, reduced, strict=True)]
    loop.close()
    return turns_in_forward, local_norm, any(alike), loop.warnings


def test_the_turn_comes_between_the_last_gradient_and_the_reduction(tmp_path):
    results = run_ranks(turns_of_a_step, 2, str(tmp_path / "run"))
    norms = [norm for _, norm, _, _ in results]
    assert [(turns, alike) for turns, _, alike, _ in results] == [(0, False)] * 2
    assert min(norms) > 0
    assert norms[0] != norms[1]
    assert [warnings for _, _, _, warnings in results] == [[], []]
