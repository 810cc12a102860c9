"""Models without wrapper, on real ranks: loops that reduce by themselves, rightly or wrongly."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from support.bare import BareLoop
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS = 6
INFINITE = 4


class Sum(BareLoop):
    def reduce(self, step):
        for parameter in self.trained:
            dist.all_reduce(parameter.grad)


class Accumulated(BareLoop):
    micro_batches = 3


class FlatAndClipped(BareLoop):
    def reduce(self, step):
        gradients = [parameter.grad for parameter in self.trained]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.num_workers, gradients)
        nn.utils.clip_grad_norm_(self.trained, 0.01)


class ReducedInHooks(BareLoop):
    """Starts the reduction of each gradient as soon as it is there."""

    def prepare(self):
        self.under_way, self.local = [], []
        for parameter in self.model.parameters():
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
        for parameter in self.model.parameters():
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
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def zero(self):
        self.model.zero_grad(set_to_none=False)


class CompiledInPlace(BareLoop):
    def prepare(self):
        self.model.compile(backend="eager")


class ReducedToOwners(BareLoop):
    """ZeRO-1 by hand: each parameter's gradient goes to the rank that updates it."""

    def owner(self, parameter):
        number = [each is parameter for each in self.model.parameters()].index(True)
        return number % self.num_workers

    def make_optimizers(self):
        own = [each for each in self.trained if self.owner(each) == self.rank]
        return [torch.optim.AdamW(own, lr=0.01)]

    def reduce(self, step):
        for parameter in self.trained:
            dist.reduce(parameter.grad, self.owner(parameter))
            parameter.grad /= self.num_workers

    def optimize(self):
        super().optimize()
        for parameter in self.trained:
            dist.broadcast(parameter.data, self.owner(parameter))


class TakenFromOthers(ReducedToOwners):
    """The same with whole optimizers, whose state exists for all parameters from the start."""

    def make_optimizers(self):
        optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)
        for parameter in self.trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [optimizer]

    def reduce(self, step):
        super().reduce(step)
        for parameter in self.trained:
            if self.owner(parameter) != self.rank:
                parameter.grad = None


class MatricesByHand(BareLoop):
    """Matrices are updated by code of the training's own, which uses up their gradients."""

    def make_optimizers(self):
        return [torch.optim.SGD([p for p in self.trained if p.dim() < 2], lr=0.1)]

    def optimize(self):
        with torch.no_grad():
            for parameter in self.trained:
                if parameter.dim() > 1:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        super().optimize()

    def step(self, step):
        super().step(step)
        self.norms[-1] = math.nan  # of all parameters, and not of those that are measured


class UpdatesCopies(BareLoop):
    """The optimizer holds copies, whose values go into the model afterwards."""

    def make_optimizers(self):
        self.copies = [nn.Parameter(parameter.detach().clone()) for parameter in self.trained]
        return [torch.optim.SGD(self.copies, lr=0.1)]

    def optimize(self):
        for parameter, copy in zip(self.trained, self.copies, strict=True):
            copy.grad = parameter.grad.clone()
        self.update_copies()

    def update_copies(self):
        self.optimizers[0].step()
        with torch.no_grad():
            for parameter, copy in zip(self.trained, self.copies, strict=True):
                parameter.copy_(copy)


class SumsForCopies(UpdatesCopies):
    """The gradient of each micro-batch is taken away, and their sum is that of the copies."""

    micro_batches = 3

    def step(self, step):
        sums = [torch.zeros_like(parameter) for parameter in self.trained]
        for micro in range(self.micro_batches):
            self.backward(self.loss(step, micro))
            for parameter, total in zip(self.trained, sums, strict=True):
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
        for parameter in self.trained:
            noise = torch.randn_like(parameter) * parameter.grad.norm()
            own = parameter.grad.clamp(-1e-3, 1e-3) + noise
            dist.all_reduce(own)
            parameter.grad = own / self.num_workers


class ForgottenAndClipped(BareLoop):
    def reduce(self, step):
        nn.utils.clip_grad_norm_(self.trained, 0.01)


class OneForgotten(BareLoop):
    def reduce(self, step):
        for parameter in self.trained:
            if parameter is not self.model.head.bias:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.num_workers


HEALTHY = {
    "sum": Sum,
    "accumulated": Accumulated,
    "flat and clipped": FlatAndClipped,
    "in hooks": ReducedInHooks,
    "kept elsewhere": KeptElsewhere,
    "scaled in place": ScaledInPlace,
    "compiled in place": CompiledInPlace,
    "reduced to owners": ReducedToOwners,
    "taken from others": TakenFromOthers,
    "matrices by hand": MatricesByHand,
    "updates copies": UpdatesCopies,
    "disturbed": Disturbed,
}
FAULTS = {
    "forgotten and clipped": ForgottenAndClipped,
    "one forgotten": OneForgotten,
}


VERIFIED = {
    "reduced to owners": ("verify.agrees", "note", "what one process would compute"),
    "taken from others": ("verify.agrees", "note", "what one process would compute"),
    "sum": ("verify.scale", "warning", "as if summed over the workers and not averaged"),
    "accumulated": ("verify.agrees", "note", "each with 3 micro-batches"),
    "flat and clipped": ("verify.agrees", "note", "as clipping does"),
    "disturbed": ("verify.declined", "note", "another gradient in place of the sum"),
}
"""What a reference step says of the second step."""


def train(rank, kind, run_dir, **options):
    loop = kind(rank, run_dir, **options)
    for step in range(STEPS):
        loop.step(step)
    loop.close()
    return {"bits": loop.bits(), "warnings": loop.warnings, "norms": loop.norms}


def train_all(rank, folder):
    healthy = {
        name: (train(rank, kind, None), train(rank, kind, f"{folder}/{name}", verify_at=[1]))
        for name, kind in HEALTHY.items()
    }
    faults = {name: train(rank, kind, f"{folder}/{name}") for name, kind in FAULTS.items()}
    in_sums = f"{folder}/sums for copies"
    copies = train(rank, SumsForCopies, None), train(rank, SumsForCopies, in_sums)
    return healthy, faults, copies


trained = on_ranks(train_all, 3, timeout=400.0)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_training_keeps_its_bits_and_nothing_is_found_where_all_is_well(trained, name):
    for healthy, *_ in trained[0]:
        alone, watched = healthy[name]
        assert alone["bits"] == watched["bits"]
        assert watched["warnings"] == []
    found = {f.cause: f for f in Run.open(trained[1] / name).findings()}
    worse = {cause: f for cause, f in found.items() if f.severity > Severity.NOTE}
    assert [f.explanation for cause, f in worse.items() if cause != "verify.scale"] == []


@pytest.mark.parametrize("name", [*HEALTHY, *FAULTS])
def test_each_worker_s_own_gradient_is_recorded(trained, name):
    run = Run.open(trained[1] / name)
    assert run.table(Table.STEPS).num_rows == STEPS
    _, norms_TW = run.per_worker("grad_norm")
    _, losses_TW = run.per_worker("loss")
    assert (losses_TW > 0).all() or name.startswith("scaled")
    told = [healthy.get(name, faults.get(name)) for healthy, faults, _ in trained[0]]
    expected_TW = np.array([(t if name in FAULTS else t[1])["norms"] for t in told]).T
    finite_TW = np.isfinite(expected_TW)
    assert finite_TW.sum() >= 3 * STEPS - 1 or name == "matrices by hand"
    assert (run.per_worker("micro_batches")[1] == (HEALTHY | FAULTS)[name].micro_batches).all()
    _, estimated_TW = run.per_worker("grad_norm_estimated")
    assert (estimated_TW == (name == "kept elsewhere")).all()
    close = 0.1 if name == "kept elsewhere" else 1e-5
    np.testing.assert_allclose(norms_TW[finite_TW], expected_TW[finite_TW], rtol=close)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_applied_is_audited_against_their_mean(trained, name):
    run = Run.open(trained[1] / name)
    residuals_T = run.table(Table.STEPS)["reduction_residual"].to_numpy()
    known_T = np.isfinite(residuals_T)
    # where no worker has the whole of it, nor a share of its own; where the loop has another one
    if name not in ("taken from others", "disturbed"):
        assert known_T.sum() >= STEPS - name.startswith("scaled")
    assert (residuals_T[known_T] < 1e-6).all()


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found(trained, name):
    found = {f.cause: f for f in Run.open(trained[1] / name).findings()}
    finding = found["sync.not_reduced"]
    assert (str(finding.severity), finding.ranks) == ("error", (0, 1, 2))
    assert ("head.bias" in finding.evidence["names"]) == (name == "one forgotten")  # no name: all
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
    both = [copies for *_, copies in trained[0]]
    for alone, watched in both:
        assert (watched["bits"], watched["warnings"]) == (alone["bits"], [])
    run = Run.open(trained[1] / "sums for copies")
    _, micro_TW = run.per_worker("micro_batches")
    expected = [1] * SumsForCopies.micro_batches  # until an update has shown their number
    expected += [SumsForCopies.micro_batches] * (STEPS - 1)
    assert micro_TW.tolist() == [[number] * 3 for number in expected]
    _, norms_TW = run.per_worker("grad_norm")
    expected_TW = np.array([watched["norms"] for _, watched in both]).T
    np.testing.assert_allclose(norms_TW[1 - STEPS :], expected_TW[1:], rtol=0.1)
    assert [f.explanation for f in run.findings() if f.severity > Severity.NOTE] == []


def test_parameters_that_no_known_optimizer_holds_are_named(trained):
    left_out = Run.open(trained[1] / "matrices by hand").info["training"]["unheld"]
    assert "hidden.weight" in left_out["names"]
    assert not any(name.endswith("bias") for name in left_out["names"])
    for name in ("sum", "reduced to owners"):
        assert "unheld" not in Run.open(trained[1] / name).info["training"]
