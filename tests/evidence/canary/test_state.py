import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch
from rankscope.evidence.canary.replay import loss_without_gradient, run_batch
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
        return (torch.rand((), generator=self.noise) * self.norm(self.layer(x))).square().mean()

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
    for at in range(0, count.count, 17):
        with Cut(at, file="/canary/"), pytest.raises(KeyboardInterrupt):
            run_batch(model, batch, CPU, seed=1)
        assert model.state() == before, at
        assert not _get_current_dispatch_mode_stack(), at
        assert not torch.is_autocast_enabled("cpu"), at
    assert run_batch(model, batch, CPU, seed=1).read() == result.read()


# Gradients that the model accumulates by itself ------------------------------------------------


def with_backward(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    torch.autograd.backward(output, given)
    return hidden.grad


def with_engine(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    Variable._execution_engine.run_backward(
        (output,), (given,), False, False, (), accumulate_grad=True
    )
    return hidden.grad


class Offloaded(torch.autograd.Function):
    """Checkpointing as trainers write it: what was saved runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, hidden: Tensor, derive: Any) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.layer, ctx.derive = layer, derive
        with torch.no_grad():
            return layer(hidden)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        return None, ctx.derive(output, given, hidden), None


class Checkpointed(nn.Module):
    def __init__(self, derive: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.derive = nn.Linear(3, 3), nn.Linear(3, 3), derive

    def forward(self, x: Tensor) -> Tensor:
        return Offloaded.apply(self.last, self.first(x), self.derive).square().mean()


@pytest.mark.parametrize("derive", [with_backward, with_engine])
def test_a_model_that_accumulates_by_itself_is_declined_before_it_does(derive):
    model, x, hooks = Checkpointed(derive), torch.randn(4, 3), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooks.append)
    model(x).backward()
    model.last.bias.grad = None
    assert len(hooks) == 4
    gradients = [p.grad for p in model.parameters()]
    bits = [None if g is None else g.clone() for g in gradients]
    with pytest.raises(CanaryDeclined, match="adds to them by itself"):
        run(model, x)
    assert len(hooks) == 4
    for parameter, gradient, before in zip(model.parameters(), gradients, bits, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, before)
    model(x).backward()  # outside of the run the engine is what it was
    assert len(hooks) == 8


def test_a_backward_pass_in_a_forward_pass_is_declined_also_without_gradients():
    def adapt(model: Stateful, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            model.layer.weight.square().sum().backward()
        return hidden

    model, batch = Stateful(adapt), capture_batch((torch.ones(1, 3),), {}).plain()
    for attempt in (run_batch, loss_without_gradient):
        with pytest.raises(CanaryDeclined, match="adds to them by itself"):
            attempt(model, batch, CPU, seed=1)
        assert model.layer.weight.grad is None


# Parameters ------------------------------------------------------------------------------------


class Teacher(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.codebook = nn.Embedding(5, 3, max_norm=0.1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        return (self.student(x) * self.teacher(x)).mean() + self.codebook(torch.tensor(1)).sum()


def replaced(model: Teacher) -> None:
    for one, other in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
        other.data = other.data * 0.9 + one.data * 0.1


def in_part(model: Teacher) -> None:
    model.teacher.weight.view(-1)[2:5].zero_()
    model.teacher.weight.t()[0] += 1


def other_memory(model: Teacher) -> None:
    model.teacher.weight.set_(torch.ones(2, 2))
    model.teacher.weight.resize_(3, 3).fill_(2)


def written_then_replaced(model: Teacher) -> None:
    model.teacher.weight.mul_(0.5)
    model.teacher.weight.data = torch.ones(3, 3)
    model.teacher.weight.mul_(0.5)


def thawed(model: Teacher) -> None:
    model.teacher.requires_grad_(requires_grad=True)


@pytest.mark.parametrize("change", [replaced, in_part, other_memory, written_then_replaced, thawed])
def test_parameters_that_a_forward_pass_changes_are_put_back(change):
    def state() -> list[Any]:
        return [
            (id(p), p.data_ptr(), p.shape, p.stride(), p.requires_grad, p.tolist())
            for p in model.parameters()
        ]

    model, x = Teacher(change), torch.randn(4, 3)
    before = state()
    assert run(model, x) == run(model, x)
    assert state() == before
    model(x)
    assert state() != before  # so there was something to put back


# Attributes ------------------------------------------------------------------------------------


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self._forward_calls = self._state_dict_reads = self._backward_passes = 0
        self.losses = {"experts": [], "by layer": {"first": ([],)}}
        self.caches = [torch.zeros(2), (torch.zeros(2), {"x": torch.zeros(2)})]
        self.hidden = [nn.BatchNorm1d(3)]
        self.total = torch.zeros(())
        self.losses["itself"] = self.losses

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.hidden[0].weight.mul_(0.5)
        y = self.hidden[0](self.layer(x))
        self._forward_calls += 1
        self._state_dict_reads += 1
        self._backward_passes += 1
        self._forward_new = y
        self.losses["experts"].append(y.square().mean())
        self.losses["by layer"]["first"][0].append(y)
        self.caches[0] += 1
        self.caches[1][0].add_(1)
        self.caches[1][1]["x"] += 1
        self.caches[1][1]["y"] = y
        self.total.detach_()
        self.total += y.square().mean()
        return self.total * 2


def test_attributes_of_any_name_and_depth_are_put_back():
    def state() -> list[Any]:
        numbers = model._forward_calls, model._state_dict_reads, model._backward_passes
        caches = [model.caches[0], model.caches[1][0], model.caches[1][1]["x"], model.total]
        teacher = [value.tolist() for value in model.hidden[0].state_dict().values()]
        lists = model.losses["experts"], model.losses["by layer"]["first"][0]
        lengths = [len(held) for held in lists]
        return [numbers, [c.tolist() for c in caches], teacher, lengths, set(vars(model))]

    model, x = Attributes(), torch.randn(4, 3)
    before = state()
    assert run(model, x) == run(model, x)
    assert state() == before
    assert model.total.grad_fn is None
    assert "y" not in model.caches[1][1]
    (model(x) + sum(model.losses["experts"])).backward()  # with nothing of the canary's in it


GENERATORS = {
    "torch": (lambda s: torch.Generator().manual_seed(s), lambda g: torch.rand((), generator=g)),
    "numpy": (np.random.default_rng, lambda g: g.random()),
    "numpy, another": (
        lambda s: np.random.Generator(np.random.MT19937(s)),
        lambda g: g.standard_normal(),
    ),
    "numpy, old": (np.random.RandomState, lambda g: g.randn()),
    "python": (random.Random, lambda g: g.gauss(0, 1)),
}


HELD: dict[str, Callable[[Any, Any], tuple[Any, ...] | None]] = {
    "attribute": lambda model, generator: setattr(model, "noise", generator),
    "container": lambda model, generator: setattr(model, "noise", {"at": (generator,)}),
    "global name": lambda model, generator: globals().update(A_GENERATOR=generator),
    "elsewhere": lambda model, generator: (generator,),
}
"""Where a generator is held; what is returned is alive in the caller alone."""


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("torch", "elsewhere"),
        ("numpy", "attribute"),
        ("numpy, another", "container"),
        ("numpy, old", "container"),
        ("python", "global name"),
    ],
)
def test_generators_are_seeded_alike_and_put_back(monkeypatch, kind, held):
    make, draw = GENERATORS[kind]
    monkeypatch.setitem(globals(), "A_GENERATOR", None)

    def make_model(rank: int) -> tuple[Stateful, Any]:
        generator = make(rank)
        model = Stateful(lambda model, hidden: hidden + float(draw(generator)))
        HELD[held](model, generator)
        draw(generator)
        return model, generator

    x = torch.ones(4, 3)
    results, after = [], []
    for rank in (1, 2):
        model, generator = make_model(rank)
        results += [run(model, x) for _ in range(2)]
        assert run(model, x, seed=2) != results[0]
        after.append(float(draw(generator)))
    assert len(set(results)) == 1
    assert after == [float(draw(make_model(rank)[1])) for rank in (1, 2)]
    assert after[0] != after[1]
