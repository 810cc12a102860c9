import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run
from rankscope.bus.evidence import Table
from support.findings import faults
from support.loops import PLAN, bits_of, collect_warnings, grad_norm, watch
from support.models import make_batch, make_model
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks
STEPS, INFINITE = 6, 4


class BareLoop:
    """A small training of a bare module; its norms are those of each step's local gradient."""

    micro_batches = 1

    def __init__(self, rank):
        self.rank, self.num_workers = rank, dist.get_world_size()
        self.model, self.norms = make_model(), []
        self.parameters = list(self.model.parameters())
        self.prepare()
        self.optimizer = self.make_optimizer()
        torch.manual_seed(100 + rank)

    def prepare(self): ...

    def make_optimizer(self):
        return torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)

    def loss(self, step, micro):
        batch = make_batch(self.rank, step * self.micro_batches + micro)
        return self.model(**batch)["loss"] / self.micro_batches

    def backward(self, loss):
        loss.backward()

    def reduce(self, step):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.num_workers

    def optimize(self):
        self.optimizer.step()

    def zero(self):
        self.model.zero_grad()

    def step(self, step):
        for micro in range(self.micro_batches):
            self.backward(self.loss(step, micro))
        self.norms.append(grad_norm(self.model))
        self.reduce(step)
        self.optimize()
        self.zero()


class Sum(BareLoop):
    def reduce(self, step):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)


class Accumulated(BareLoop):
    micro_batches = 3


class FlatAndClipped(BareLoop):
    def reduce(self, step):
        gradients = [parameter.grad for parameter in self.parameters]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.num_workers, gradients)
        nn.utils.clip_grad_norm_(self.parameters, 0.01)


class ReducedInHooks(BareLoop):
    """Starts the reduction of each gradient as soon as it is there."""

    def prepare(self):
        self.under_way, self.local = [], []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.begin)

    def begin(self, parameter):
        self.local.append(parameter.grad.double().square().sum())
        self.under_way.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def step(self, step):
        super().step(step)  # which finds gradients whose reduction is under way
        self.norms[-1] = float(torch.stack(self.local).sum().sqrt())
        self.local.clear()

    def reduce(self, step):
        for parameter, work in self.under_way:
            work.wait()
            parameter.grad /= self.num_workers
        self.under_way.clear()


class KeptElsewhere(BareLoop):
    """Hooks move each micro-batch's gradient into a buffer, and the reduced one comes back last."""

    micro_batches = 3

    def prepare(self):
        self.kept, self.nodes, self.passes = {}, [], 0
        for parameter in self.parameters:
            self.kept[parameter] = torch.zeros_like(parameter)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, parameter=parameter: self.move(parameter))
            self.nodes.append(node)

    def move(self, parameter):
        self.kept[parameter] += parameter.grad
        parameter.grad = None

    def backward(self, loss):
        super().backward(loss)
        self.passes += 1
        if self.passes % self.micro_batches == 0:
            for parameter, kept in self.kept.items():
                parameter.grad = kept

    def zero(self):
        super().zero()
        for kept in self.kept.values():
            kept.zero_()


class ScaledInPlace(BareLoop):
    """A gradient scaler that skips a step, whose gradient overflows on one worker."""

    micro_batches = 2

    def prepare(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
        self.number = 0

    def backward(self, loss):
        if self.number == INFINITE and self.rank == 1:
            loss = loss * math.inf
        self.number += 1
        self.scaler.scale(loss).backward()

    def optimize(self):
        self.norms[-1] /= self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero(self):
        self.model.zero_grad(set_to_none=False)


class ScaledInTurn(ScaledInPlace):
    """Two optimizers, whose gradients the scaler unscales one after the other."""

    def make_optimizer(self):
        kinds = [[p for p in self.parameters if (p.dim() > 1) is wide] for wide in (True, False)]
        return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for parameters in kinds]

    def optimize(self):
        self.norms[-1] /= self.scaler.get_scale()
        for optimizer in self.optimizer:
            self.scaler.step(optimizer)
        self.scaler.update()


class CompiledInPlace(BareLoop):
    def prepare(self):
        self.model.compile(backend="eager")


class ReducedToOwners(BareLoop):
    """ZeRO-1 by hand: each parameter's gradient goes to the rank that updates it."""

    def owner(self, parameter):
        number = [each is parameter for each in self.parameters].index(True)
        return number % self.num_workers

    def make_optimizer(self):
        own = [each for each in self.parameters if self.owner(each) == self.rank]
        return torch.optim.AdamW(own, lr=0.01)

    def reduce(self, step):
        for parameter in self.parameters:
            dist.reduce(parameter.grad, self.owner(parameter))
            parameter.grad /= self.num_workers

    def optimize(self):
        super().optimize()
        for parameter in self.parameters:
            dist.broadcast(parameter.data, self.owner(parameter))


class TakenFromOthers(ReducedToOwners):
    """The same with whole optimizers, whose state exists for all parameters from the start."""

    def make_optimizer(self):
        optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        for parameter in self.parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer

    def reduce(self, step):
        super().reduce(step)
        for parameter in self.parameters:
            if self.owner(parameter) != self.rank:
                parameter.grad = None


class MatricesByHand(BareLoop):
    """Matrices are updated by code of the training's own, which uses up their gradients."""

    def make_optimizer(self):
        return torch.optim.SGD([p for p in self.parameters if p.dim() < 2], lr=0.1)

    def optimize(self):
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.dim() > 1:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        super().optimize()

    def step(self, step):
        super().step(step)
        self.norms[-1] = math.nan  # of all parameters, and not of those that are measured


class UpdatesCopies(BareLoop):
    """The optimizer holds copies, whose values go into the model afterwards."""

    def make_optimizer(self):
        self.copies = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        return torch.optim.SGD(self.copies, lr=0.1)

    def optimize(self):
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = parameter.grad.clone()
        self.update_copies()

    def update_copies(self):
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)


class SumsForCopies(UpdatesCopies):
    """The gradient of each micro-batch is taken away, and their sum is that of the copies."""

    micro_batches = 3

    def step(self, step):
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        for micro in range(self.micro_batches):
            self.backward(self.loss(step, micro))
            for parameter, total in zip(self.parameters, sums, strict=True):
                total.add_(parameter.grad)
                parameter.grad = None
        self.norms.append(float(nn.utils.parameters_to_vector(sums).double().norm()))
        for copy, total in zip(self.copies, sums, strict=True):
            dist.all_reduce(total)
            copy.grad = total / self.num_workers
        self.update_copies()


class Disturbed(BareLoop):
    """Replaces the gradient by one of its own: far from a mean, and equal on all workers."""

    def reduce(self, step):
        for parameter in self.parameters:
            noise = torch.randn_like(parameter) * parameter.grad.norm()
            own = parameter.grad.clamp(-1e-3, 1e-3) + noise
            dist.all_reduce(own)
            parameter.grad = own / self.num_workers


class ForgottenAndClipped(BareLoop):
    def reduce(self, step):
        nn.utils.clip_grad_norm_(self.parameters, 0.01)


class OneForgotten(BareLoop):
    def reduce(self, step):
        for parameter in self.parameters:
            if parameter is not self.model.head.bias:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.num_workers


HEALTHY = {
    kind.__name__: kind
    for kind in (
        *(Sum, Accumulated, FlatAndClipped, ReducedInHooks, KeptElsewhere, ScaledInPlace),
        *(
            ScaledInTurn,
            CompiledInPlace,
            ReducedToOwners,
            TakenFromOthers,
            MatricesByHand,
            UpdatesCopies,
        ),
        Disturbed,
    )
}
FAULTS = {kind.__name__: kind for kind in (ForgottenAndClipped, OneForgotten)}
VERIFIED = {
    "ReducedToOwners": ("verify.agrees", "note", "what one process would compute"),
    "TakenFromOthers": ("verify.agrees", "note", "what one process would compute"),
    "Sum": ("verify.scale", "warning", "as if summed over the workers and not averaged"),
    "Accumulated": ("verify.agrees", "note", "each with 3 micro-batches"),
    "FlatAndClipped": ("verify.agrees", "note", "as clipping does"),
    "Disturbed": ("verify.declined", "note", "another gradient in place of the sum"),
}
"""What a reference step says of the second step."""


def train(rank, kind, run_dir, **options):
    warnings, loop = collect_warnings(), kind(rank)
    with watch(loop.model, loop.optimizer, run_dir=run_dir, plan=PLAN, **options):
        for step in range(STEPS):
            loop.step(step)
    optimizers = loop.optimizer if isinstance(loop.optimizer, list) else [loop.optimizer]
    bits = bits_of(loop.model, optimizers)
    return {"bits": bits, "warnings": warnings, "norms": loop.norms}


def train_all(rank, folder):
    return {
        name: [
            train(rank, kind, run_dir, verify_at=[1] if name in HEALTHY else [])
            for run_dir in (None, f"{folder}/{name}")
        ]
        for name, kind in {**HEALTHY, **FAULTS, "SumsForCopies": SumsForCopies}.items()
    }


trained = on_ranks(train_all, 3, timeout=400.0)


@pytest.mark.parametrize("name", [*HEALTHY, "SumsForCopies"])
def test_the_training_keeps_its_bits_and_nothing_is_found_where_all_is_well(trained, name):
    for alone, watched in (results[name] for results in trained[0]):
        assert (watched["bits"], watched["warnings"]) == (alone["bits"], [])
    worse = faults(Run.open(trained[1] / name)).values()
    assert [f.explanation for f in worse if f.cause != "verify.scale"] == []


@pytest.mark.parametrize("name", [*HEALTHY, *FAULTS])
def test_each_worker_s_own_gradient_is_recorded(trained, name):
    run = Run.open(trained[1] / name)
    assert run.table(Table.STEPS).num_rows == STEPS
    _, norms_TW = run.per_worker("grad_norm")
    _, losses_TW = run.per_worker("loss")
    assert (losses_TW > 0).all() or "Scaled" in name
    expected_TW = np.array([results[name][1]["norms"] for results in trained[0]]).T
    finite_TW = np.isfinite(expected_TW)
    assert finite_TW.sum() >= 3 * STEPS - 1 or name == "MatricesByHand"
    assert (run.per_worker("micro_batches")[1] == (HEALTHY | FAULTS)[name].micro_batches).all()
    _, estimated_TW = run.per_worker("grad_norm_estimated")
    assert (estimated_TW == (name == "KeptElsewhere")).all()
    close = 0.1 if name == "KeptElsewhere" else 1e-5
    np.testing.assert_allclose(norms_TW[finite_TW], expected_TW[finite_TW], rtol=close)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_applied_is_audited_against_their_mean(trained, name):
    run = Run.open(trained[1] / name)
    residuals_T = run.table(Table.STEPS)["reduction_residual"].to_numpy()
    known_T = np.isfinite(residuals_T)
    # where no worker has the whole of it, nor a share of its own; where the loop has another one
    if name not in ("TakenFromOthers", "Disturbed"):
        assert known_T.sum() >= STEPS - ("Scaled" in name)
    assert (residuals_T[known_T] < 1e-6).all()


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found(trained, name):
    found = {f.cause: f for f in Run.open(trained[1] / name).findings()}
    finding = found["sync.not_reduced"]
    assert (str(finding.severity), finding.ranks) == ("error", (0, 1, 2))
    assert ("head.bias" in finding.evidence["names"]) == (name == "OneForgotten")  # no name: all
    assert "hidden.weight" not in finding.evidence["names"]
    assert str(found["state.parameters_differ"].severity) == "error"


@pytest.mark.parametrize("name", VERIFIED)
def test_a_reference_step_tells_what_it_can(trained, name):
    cause, severity, words = VERIFIED[name]
    found = {f.id: f for f in Run.open(trained[1] / name).findings()}
    finding = found[f"{cause}:step-1"]
    assert str(finding.severity) == severity
    assert words in finding.explanation


def test_passes_whose_gradients_are_taken_away_for_copies_make_one_step(trained):
    run = Run.open(trained[1] / "SumsForCopies")
    _, micro_TW = run.per_worker("micro_batches")
    expected = [1] * SumsForCopies.micro_batches  # until an update has shown their number
    expected += [SumsForCopies.micro_batches] * (STEPS - 1)
    assert micro_TW.tolist() == [[number] * 3 for number in expected]
    _, norms_TW = run.per_worker("grad_norm")
    expected_TW = np.array([results["SumsForCopies"][1]["norms"] for results in trained[0]]).T
    np.testing.assert_allclose(norms_TW[1 - STEPS :], expected_TW[1:], rtol=0.1)


def test_parameters_that_no_known_optimizer_holds_are_named(trained):
    left_out = Run.open(trained[1] / "MatricesByHand").info["training"]["unheld"]
    assert "hidden.weight" in left_out["names"]
    assert not any(name.endswith("bias") for name in left_out["names"])
    for name in ("Sum", "ReducedToOwners"):
        assert "unheld" not in Run.open(trained[1] / name).info["training"]
