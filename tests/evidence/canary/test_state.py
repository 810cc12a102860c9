"""A canary leaves nothing behind, whatever a model does in its forward and backward pass."""

import random
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch
from rankscope.evidence.canary.replay import loss_without_gradient, run_batch

CPU = torch.device("cpu")


def run(model: nn.Module, *args: Any, seed: int = 1) -> Any:
    return run_batch(model, capture_batch(args, {}).plain(), CPU, seed=seed).read()


# Gradients that the model accumulates by itself ------------------------------------------------


def with_backward(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    torch.autograd.backward(output, given)
    return hidden.grad


def with_method(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    output.backward(given)
    return hidden.grad


def with_engine(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    Variable._execution_engine.run_backward(
        (output,), (given,), False, False, (), accumulate_grad=True
    )
    return hidden.grad


def with_grad(output: Tensor, given: Tensor, hidden: Tensor) -> Tensor | None:
    (gradient,) = torch.autograd.grad(output, hidden, given)
    return gradient


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


@pytest.mark.parametrize("derive", [with_backward, with_method, with_engine])
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


def test_a_model_that_only_derives_inside_its_backward_pass_is_run():
    model, x = Checkpointed(with_grad), torch.randn(4, 3)
    result = run(model, x)
    weight, bias = torch.autograd.grad(model(x), [model.first.weight, model.first.bias])
    norm = torch.cat([weight.flatten(), bias]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)


class Calls(nn.Module):
    """A layer, and something that its forward pass does."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act = nn.Linear(3, 3), act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.layer(x).square().mean()


def test_backward_passes_of_other_threads_go_on():
    other = torch.ones(2, requires_grad=True)

    def train_elsewhere(model: Calls) -> None:
        thread = threading.Thread(target=lambda: other.square().sum().backward())
        thread.start()
        thread.join()

    run(Calls(train_elsewhere), torch.ones(1, 3))
    assert other.grad is not None
    assert other.grad.tolist() == [2, 2]


def test_a_backward_pass_in_a_forward_pass_is_declined_also_without_gradients():
    def adapt(model: Calls) -> None:
        with torch.enable_grad():
            model.layer.weight.square().sum().backward()

    model = Calls(adapt)
    for attempt in (run, lambda model, x: loss_without_gradient(model, batch_of(x), CPU, seed=1)):
        with pytest.raises(CanaryDeclined, match="adds to them by itself"):
            attempt(model, torch.ones(1, 3))
        assert model.layer.weight.grad is None


def batch_of(*args: Any) -> Any:
    return capture_batch(args, {}).plain()


def test_a_gradient_that_a_model_sets_is_put_back_and_the_run_declined():
    def replace(model: Calls) -> None:
        model.layer.weight.grad = torch.ones(3, 3)

    model = Calls(replace)
    before = model.layer.weight.grad = torch.full((3, 3), 2.0)
    with pytest.raises(CanaryDeclined, match="leaves all gradients alone"):
        run(model, torch.ones(1, 3))
    assert model.layer.weight.grad is before
    assert before.tolist() == torch.full((3, 3), 2.0).tolist()


# Parameters ------------------------------------------------------------------------------------


class Teacher(nn.Module):
    """A layer that is trained, one that follows it, and a codebook."""

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


def averaged(model: Teacher) -> None:
    model.teacher.weight.lerp_(model.student.weight, 0.1)


def averaged_together(model: Teacher) -> None:
    torch._foreach_mul_(list(model.teacher.parameters()), 0.9)


def clamped(model: Teacher) -> None:
    model.student.weight.data.clamp_(-0.1, 0.1)


def in_part(model: Teacher) -> None:
    model.teacher.weight.view(-1)[2:5].zero_()
    model.teacher.weight.t()[0] += 1


def into(model: Teacher) -> None:
    torch.add(model.student.bias, 1, out=model.teacher.bias)


def given_other_memory(model: Teacher) -> None:
    model.teacher.weight.set_(torch.ones(2, 2))
    model.teacher.weight.resize_(3, 3).fill_(2)


def written_then_replaced(model: Teacher) -> None:
    model.teacher.weight.mul_(0.5)
    model.teacher.weight.data = torch.ones(3, 3)
    model.teacher.weight.mul_(0.5)


def thawed(model: Teacher) -> None:
    model.teacher.requires_grad_(requires_grad=True)


def nothing(model: Teacher) -> None:  # but the codebook, whose rows are scaled to max_norm
    pass


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        averaged,
        averaged_together,
        clamped,
        in_part,
        into,
        given_other_memory,
        written_then_replaced,
        thawed,
        nothing,
    ],
)
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


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_parameters_and_large_buffers_are_only_copied_when_they_are_written():
    model, x = Teacher(lambda model: None), torch.randn(4, 3)
    model.codebook = nn.Embedding(5, 3)
    model.base = nn.Linear(600, 600, dtype=torch.float64).requires_grad_(False)
    model.register_buffer("packed", torch.zeros(2**20 + 1, dtype=torch.uint8))
    with Copies() as copies:
        run(model, x)
    assert copies.num_bytes < 600 * 600 * 8 / 2

    def write(model: Teacher) -> None:
        model.packed[3:].add_(1)
        model.base.weight.mul_(2)

    model.change = write
    before = model.base.weight.clone()
    with Copies() as copies:
        run(model, x)
    assert copies.num_bytes >= model.base.weight.nbytes + model.packed.nbytes
    assert torch.equal(model.base.weight, before)
    assert not model.packed.any()


def test_a_write_that_cannot_be_undone_is_declined():
    def write(model: Calls) -> None:
        with torch.no_grad():
            model.pair.mul_(2)

    model = Calls(lambda model: None)
    model.pair = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False)
    run(model, torch.ones(1, 3))
    model.act = write
    with pytest.raises(CanaryDeclined, match="writes into a tensor of the kind"):
        run(model, torch.ones(1, 3))
    assert model.pair.a.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("hold", [torch.clone, partial(nn.Parameter, requires_grad=False)])
def test_sparse_tensors_get_their_values_back_and_a_write_into_them_is_declined(layout, hold):
    def replace(model: Calls) -> None:
        model.graph.data = model.graph.data * 2

    def write(model: Calls) -> None:
        with torch.no_grad():
            model.graph.mul_(2)

    model = Calls(replace)
    model.graph = hold(torch.eye(3).to_sparse(layout=layout))
    run(model, torch.ones(1, 3))
    model.act = write
    with pytest.raises(CanaryDeclined, match=f"writes into a tensor of the kind .*{layout}"):
        run(model, torch.ones(1, 3))
    assert torch.equal(model.graph.to_dense(), torch.eye(3))


# Attributes ------------------------------------------------------------------------------------


class Attributes(nn.Module):
    """Keeps much in places that are no buffers."""

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
    [*product(GENERATORS, list(HELD)[:3]), ("torch", "elsewhere")],
)
def test_generators_are_seeded_alike_and_put_back(monkeypatch, kind, held):
    make, draw = GENERATORS[kind]
    monkeypatch.setitem(globals(), "A_GENERATOR", None)

    def make_model(rank: int) -> tuple[Calls, Any]:
        model = Calls(lambda model: setattr(model, "drawn", float(draw(generator))))
        model.layer.register_forward_hook(lambda layer, args, output: output + model.drawn)
        generator = make(rank)
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


class Proxy:
    """Stands for something that is not there yet, as Flask's request does."""

    @property
    def __class__(self):
        raise RuntimeError("there is no request")


def test_global_names_are_not_asked_what_they_are(monkeypatch):
    monkeypatch.setitem(globals(), "A_PROXY", Proxy())
    run(Calls(lambda model: None), torch.ones(1, 3))


def test_a_generator_without_a_state_is_left_alone():
    model = Calls(lambda model: None)
    model.entropy = random.SystemRandom()
    run(model, torch.ones(1, 3))
