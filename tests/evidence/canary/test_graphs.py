"""A canary beside the graphs of the training, and what is left when not all goes well."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch
from rankscope.evidence.canary.replay import run_batch
from rankscope.evidence.canary.state import NotPutBackError
from support.cut import Cut

from .test_replay import CPU, run


class Stateful(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act = nn.Linear(3, 3), act
        self.state = torch.zeros(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x)).square().mean()


def goes_on(model: Stateful, hidden: Tensor) -> Tensor:
    model.state = torch.tanh(hidden + model.state)
    return model.state


def adds_in_place(model: Stateful, hidden: Tensor) -> Tensor:
    model.state += torch.tanh(hidden)
    return hidden + model.state.detach()


def clamped(model: Stateful, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight.clamp_(-0.1, 0.1)
        model.state.add_(1)
    return hidden


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (goes_on, "goes on with a graph of the steps before"),
        (adds_in_place, "part of a graph of the training"),
    ],
)
def test_a_graph_that_the_training_still_needs_is_neither_released_nor_changed(act, reason):
    def train(*, canary: bool) -> list[Any]:
        model, gradients = Stateful(act), []
        for step in range(3):
            x = torch.full((4, 3), step + 1.0)
            if canary and step:
                node, state = model.state.grad_fn, model.state.tolist()
                with pytest.raises(CanaryDeclined, match=reason):
                    run(model, x)
                assert model.state.grad_fn is node
                assert model.state.tolist() == state
            loss = model(x) + model.state.sum()
            gradients.append(torch.autograd.grad(loss, model.layer.weight, retain_graph=True)[0])
        return [gradient.tolist() for gradient in gradients]

    assert train(canary=True) == train(canary=False)


def test_a_pending_graph_does_not_notice_that_what_it_saved_was_written_meanwhile():
    model = Stateful(clamped)
    with torch.no_grad():
        model.layer.weight.fill_(0.5)
    penalty = model.layer.weight.square().sum() + (model.layer.bias * model.state).sum()
    versions = [tensor._version for tensor in (model.layer.weight, model.state)]
    run(model, torch.ones(4, 3))
    assert [tensor._version for tensor in (model.layer.weight, model.state)] == versions
    penalty.backward()  # which raises if one was written since
    assert model.layer.weight.grad.tolist() == [[1.0] * 3] * 3
    model(torch.ones(4, 3))
    assert model.layer.weight._version > versions[0]


# Failures --------------------------------------------------------------------------------------


class Sticky(list[int]):
    def clear(self) -> None:
        raise TypeError("this list only grows")


def test_what_cannot_be_put_back_is_no_refusal_and_keeps_nothing_else_from_being_put_back():
    def grow(model: Stateful, hidden: Tensor) -> Tensor:
        model.held[0].append(1)
        model.held[1].append(1)
        return clamped(model, hidden)

    model = Stateful(grow)
    model.held = [Sticky(), []]
    weight, gradient = model.layer.weight.tolist(), torch.ones(3, 3)
    model.layer.weight.grad = gradient
    generators = random.getstate(), torch.get_rng_state().tolist()
    batch = capture_batch((torch.ones(4, 3),), {}).plain()
    with pytest.raises(NotPutBackError, match=r"left its traces.*this list only grows"):
        run_batch(model, batch, CPU, seed=1)
    assert model.held == [[1], []]
    assert model.layer.weight.tolist() == weight
    assert model.layer.weight.grad is gradient
    assert (random.getstate(), torch.get_rng_state().tolist()) == generators


def test_containers_are_compared_without_asking_what_is_in_them():
    def swap(model: Stateful, hidden: Tensor) -> Tensor:
        model.seen.popitem()
        model.seen[torch.ones(2)] = hidden
        return hidden

    model = Stateful(swap)
    key = torch.zeros(2)
    model.seen = {key: 1}
    run(model, torch.ones(4, 3))
    assert [(name is key, value) for name, value in model.seen.items()] == [(True, 1)]


STRIDE = 17


class Changing(nn.Module):
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
