"""What happens to a gradient between its micro-batches, and after the reduction, on real ranks."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Finding, Run, Severity
from rankscope.bus.evidence import Table
from rankscope.verdict.diagnosis import diagnose_run
from support.ranks import run_ranks

STEPS, MICRO = 13, 3


class Net(nn.Module):
    """Nine layers, so that most hooks can be spared, and a scale for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *, scaled: bool = True) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x * self.scale if scaled else x


class Case:
    """A healthy training that accumulates."""

    ddp_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.ddp = DistributedDataParallel(self.net, **self.ddp_options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        torch.manual_seed(1 + rank)

    def num_micro(self, step: int) -> int:
        return MICRO

    def loss(self, step: int, micro: int) -> Tensor:
        return self.ddp(torch.randn(4, 6)).square().mean() / MICRO  # type: ignore[no-any-return]

    def between(self, step: int, micro: int) -> None: ...

    def reduced(self, step: int) -> None: ...

    def zero(self, step: int) -> None:
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self.net.parameters() if p.grad is not None)

    def train(self, run_dir: str) -> None:
        options = {"canary": False, "announce": False}
        with rankscope.watch(self.ddp, self.optimizer, run_dir=run_dir, **options):  # type: ignore[arg-type]
            for step in range(STEPS):
                count = self.num_micro(step)
                for micro in range(count):
                    last = micro == count - 1
                    with nullcontext() if last else self.ddp.no_sync():
                        loss = self.loss(step, micro)
                        if micro:
                            self.between(step, micro)
                        loss.backward()
                self.reduced(step)
                self.optimizer.step()
                self.zero(step)


class InBuckets(Case):
    ddp_options = {"gradient_as_bucket_view": True}  # noqa: RUF012

    def zero(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class PreparedLate(Case):
    """All forward passes are inside no_sync; the training prepares the reduction after the last."""

    def loss(self, step: int, micro: int) -> Tensor:
        with self.ddp.no_sync():
            loss = super().loss(step, micro)
        if micro == MICRO - 1:
            self.ddp.require_forward_param_sync = True
            self.ddp.reducer.prepare_for_backward([])
        return loss


def leave(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class ReducedElsewhere(PreparedLate):
    """Its communication hook leaves gradients alone; the training reduces them later."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.ddp.register_comm_hook(None, leave)

    def reduced(self, step: int) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


class ShorterWindows(Case):
    def num_micro(self, step: int) -> int:
        return (3, 1, 2)[step % 3]


class AlwaysOne(Case):
    def num_micro(self, step: int) -> int:
        return 1


class ScaleOutsideOfTheModel(Case):
    """The backward pass reaches a parameter before it reaches what the model returned."""

    def loss(self, step: int, micro: int) -> Tensor:
        output = self.ddp(torch.randn(4, 6), scaled=False)
        return (output * self.net.scale).square().mean()  # type: ignore[no-any-return]


class SharpnessAware(Case):
    """The first pass only tells where the second one computes its gradient."""

    def num_micro(self, step: int) -> int:
        return 2

    def loss(self, step: int, micro: int) -> Tensor:
        if micro:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=0.01)
            self.optimizer.zero_grad()
        return super().loss(step, micro)


class ResetInPlace(InBuckets):
    def between(self, step: int, micro: int) -> None:
        if micro == 2:
            self.optimizer.zero_grad(set_to_none=False)


class DoubledBehindAutograd(Case):
    def between(self, step: int, micro: int) -> None:
        for gradient in self.gradients():
            gradient.data.mul_(2)  # its version stays


class OneLayerChanged(Case):
    def between(self, step: int, micro: int) -> None:
        if micro == 2 and step >= 4:
            gradient = self.net.layers[5].weight.grad
            assert gradient is not None
            gradient.zero_()


class LeftOver(AlwaysOne):
    def zero(self, step: int) -> None:
        if step % 4 != 3:
            self.optimizer.zero_grad()


class LayerChangedAfterwards(AlwaysOne):
    def reduced(self, step: int) -> None:
        for parameter in self.net.layers[2].parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3)


def cases(base: type[Case]) -> dict[str, type[Case]]:
    found: dict[str, type[Case]] = {}
    for each in base.__subclasses__():
        found |= {each.__name__: each} | cases(each)
    return found


def train_all(rank: int, folder: str) -> None:
    for name, case in cases(Case).items():
        case(rank).train(f"{folder}/{name}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(train_all, 2, str(folder), timeout=400)
    return {name: Run.open(folder / name) for name in cases(Case)}


def told(run: Run) -> dict[str, Finding]:
    """Return what was said of gradients, live and from the record alone."""
    findings = {f.id: f for f in run.findings() if f.cause.startswith("sync.")}
    assert {f.id: f for f in diagnose_run(run) if f.id in findings} == findings
    return findings


HEALTHY = (
    *("InBuckets", "PreparedLate", "ReducedElsewhere", "ShorterWindows", "AlwaysOne"),
    *("ScaleOutsideOfTheModel", "SharpnessAware"),
)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_raise_nothing(runs, name):
    assert told(runs[name]) == {}


def test_what_a_pass_finds_is_what_the_one_before_has_left(runs):
    for name in ("InBuckets", "ShorterWindows"):
        changes_TW = runs[name].per_worker("accumulator_change")[1]
        several = [step for step in range(STEPS) if name != "ShorterWindows" or step % 3 != 1]
        known = changes_TW[several[4:]]  # how gradients are read is learnt first
        assert np.isfinite(known).all(), name
        assert (known < 1e-6).all(), name
        assert runs[name].columns(Table.STEPS, "observed")["observed"][4:].all(), name


def test_a_reduction_that_the_training_prepares_is_measured_as_any_other(runs):
    late, other = runs["PreparedLate"], runs["InBuckets"]
    assert late.columns(Table.STEPS, "observed")["observed"].all()
    both = other.columns(Table.STEPS, "observed")["observed"]
    assert both[4:].all()
    for column in ("grad_norm", "reduced_norm", "micro_batches"):
        late_TW, other_TW = (run.per_worker(column)[1][both] for run in (late, other))
        np.testing.assert_allclose(late_TW, other_TW, rtol=1e-6)


@pytest.mark.parametrize("name", ["ScaleOutsideOfTheModel", "SharpnessAware"])
def test_what_cannot_be_told_is_not_said(runs, name):
    assert np.isnan(runs[name].per_worker("accumulator_change")[1][2:]).all()


@pytest.mark.parametrize(
    ("name", "kind", "factor", "micro"),
    [
        ("ResetInPlace", "reset", 0.0, 2),
        ("DoubledBehindAutograd", "doubled", 2.0, 1),
    ],
)
def test_the_kind_of_change_and_its_micro_batch_are_named(runs, name, kind, factor, micro):
    [found] = told(runs[name]).values()
    assert (found.id, found.severity, found.ranks) == (
        "sync.accumulation",
        Severity.ERROR,
        (0, 1),
    )
    assert found.evidence["kind"] == kind
    assert found.evidence["factor"] == pytest.approx(factor, rel=1e-5)
    assert found.evidence["micro_batch"] == micro
    assert found.first_step <= 3
    assert found.groups == ()


def test_a_single_layer_is_named(runs):
    [found] = told(runs["OneLayerChanged"]).values()
    assert (found.id, found.severity, found.first_step) == (
        "sync.accumulation",
        Severity.WARNING,
        4,
    )
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == ("changed in part", 2)
    assert found.groups == ("layers.5",)
    assert "layers.5" in found.explanation


def test_a_gradient_that_was_not_zeroed_is_told(runs):
    [found] = told(runs["LeftOver"]).values()
    assert (found.id, found.cause, found.severity) == (
        "gradient-left-over",
        "sync.accumulation",
        Severity.ERROR,
    )
    assert (found.first_step, found.evidence["steps"]) == (4, 3)


def test_a_layer_that_is_changed_after_the_reduction_is_named(runs):
    [found] = told(runs["LayerChangedAfterwards"]).values()
    assert (found.id, found.severity) == ("sync.changed_later", Severity.WARNING)
    assert set(found.evidence["names"]) == {"layers.2.weight", "layers.2.bias"}
    assert found.evidence["factor"] == pytest.approx(3, rel=1e-5)
