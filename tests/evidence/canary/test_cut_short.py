"""A canary that Ctrl-C ends leaves nothing behind: what the training saves then is its own."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankscope.evidence.canary.batch import capture_batch
from rankscope.evidence.canary.replay import run_batch
from support.cut import Cut

CPU = torch.device("cpu")
STRIDE = 17


class Changing(nn.Module):
    """Changes all that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("replaced", torch.zeros(3))
        self.noise = torch.Generator()
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layer.weight, 0.1)
        self.replaced = self.replaced + random.random() + np.random.rand()  # noqa: NPY002
        self.calls += 1
        self.seen.append(x)
        drawn = torch.rand((), generator=self.noise)
        return (drawn * self.norm(self.layer(x))).square().mean()

    def state(self) -> list[Any]:
        """Return all that a training would go on with."""
        return [
            {name: value.tolist() for name, value in self.state_dict().items()},
            [None if p.grad is None else p.grad.tolist() for p in self.parameters()],
            [self.noise.get_state().tolist(), len(self.seen), self.calls],
            [random.getstate(), torch.get_rng_state().tolist()],
            np.random.get_state(legacy=False)["state"]["key"].tolist(),  # noqa: NPY002
        ]


def test_all_is_put_back_wherever_it_is_interrupted():
    model, x = Changing(), torch.randn(4, 3)
    model(x).backward()
    batch = capture_batch((x,), {}).plain()
    before = model.state()
    with Cut(file="/canary/") as count:
        result = run_batch(model, batch, CPU, seed=1)
    assert count.count > 500
    for at in range(0, count.count, STRIDE):
        with Cut(at, file="/canary/"), pytest.raises(KeyboardInterrupt):
            run_batch(model, batch, CPU, seed=1)
        assert model.state() == before, at
        assert not _get_current_dispatch_mode_stack(), at
        assert not torch.is_autocast_enabled("cpu"), at
    assert run_batch(model, batch, CPU, seed=1).read() == result.read()
