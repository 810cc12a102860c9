"""Parameters that do not learn, or learn on some workers alone, on real ranks."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Finding, Run, Severity
from rankscope.errors import UsageError
from rankscope.verdict.diagnosis import diagnose_run
from support.ranks import run_ranks

STEPS = 16


class Net(nn.Module):
    """Two layers, a scale that may get a zero gradient, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.expert, self.idle = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.first(x).tanh()).square().mean()
        return loss + (0 * self.expert).sum()


def named(net: Net, *names: str) -> list[nn.Parameter]:
    return [parameter for name, parameter in net.named_parameters() if name.startswith(names)]


class Case:
    """A healthy training; what is wrong is for those that derive from it."""

    left_out: tuple[str, ...] = ()
    held: tuple[str, ...] = ("",)
    steps = STEPS
    plan: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.net = rank, Net()
        if self.left_out:
            setattr(self.net, "_ddp_params_and_buffers_to_ignore", self.left_out)  # noqa: B010
        self.before_wrap()
        self.ddp = DistributedDataParallel(self.net, find_unused_parameters=True)
        self.after_wrap()
        self.optimizer = torch.optim.SGD(named(self.net, *self.held), lr=0.1, weight_decay=0.01)
        torch.manual_seed(1 + rank)

    def before_wrap(self) -> None: ...

    def after_wrap(self) -> None: ...

    def before_step(self, step: int) -> None: ...

    def train(self, run_dir: str) -> None:
        options = {"canary": False, "announce": False, "plan": self.plan}
        with rankscope.watch(self.ddp, self.optimizer, run_dir=run_dir, **options):  # type: ignore[arg-type]
            for step in range(self.steps):
                self.before_step(step)
                self.ddp(torch.randn(4, 6)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


class Forgotten(Case):
    held = ("first",)


class ForgottenAtFirst(Forgotten):
    def before_step(self, step: int) -> None:
        if step == STEPS // 2:
            self.optimizer.add_param_group({"params": named(self.net, "last", "expert", "idle")})


class ExpertWithoutTokens(Case):
    """Nor weight decay: it keeps its bits."""

    def before_step(self, step: int) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.0


class FrozenOnOneRank(Case):
    def after_wrap(self) -> None:
        if self.rank == 1:
            self.net.last.bias.requires_grad_(False)


class OthersHeld(Case):
    """The optimizer holds what the last layer's parameters were made of, and nothing moves them."""

    held = ("first", "expert", "idle")
    steps = 34

    def before_step(self, step: int) -> None:
        if step == 0:
            self.others = [nn.Parameter(p.detach().clone()) for p in named(self.net, "last")]
            self.optimizer.add_param_group({"params": self.others})


class CopiesUpdated(OthersHeld):
    """They are copies, from which the model gets each update, one step later."""

    def before_step(self, step: int) -> None:
        super().before_step(step)
        with torch.no_grad():
            for p, copy in zip(named(self.net, "last"), self.others, strict=True):
                p.copy_(copy)
                copy.grad = torch.ones_like(p)


CASES = {
    case.__name__: case
    for case in (*Case.__subclasses__(), ForgottenAtFirst, OthersHeld, CopiesUpdated)
}


def train_all(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    for name, case in CASES.items():
        case(rank).train(f"{folder}/{name}")
    ours = Case(rank)
    if rank == 1:
        ours.net.last.requires_grad_(False)
    with pytest.raises(UsageError, match=r"only rank 0 trains some of \['last'\]"):
        ours.train(f"{folder}/refused")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(train_all, 2, str(folder), timeout=240)
    return {name: Run.open(folder / name) for name in CASES}


def told(run: Run) -> dict[str, Finding]:
    findings = {f.id: f for f in run.findings() if f.cause.startswith(("state.", "sync."))}
    again = {f.id: f for f in diagnose_run(run) if f.id in findings}
    assert again == findings, "the record alone tells the same"
    return findings


HEALTHY = ("ExpertWithoutTokens", "CopiesUpdated")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_raise_nothing(runs, name):
    assert told(runs[name]) == {}


def test_parameters_that_no_optimizer_holds_are_named(runs):
    [found] = told(runs["Forgotten"]).values()
    assert (found.id, found.severity, found.status) == (
        "state.not_updated",
        Severity.WARNING,
        "open",
    )
    assert sorted(found.evidence["names"]) == ["last.bias", "last.weight"]
    assert "last.weight" in found.explanation
    assert found.first_step == 2


def test_other_tensors_in_the_place_of_parameters_are_an_error(runs):
    found = told(runs["OthersHeld"])["state.other_tensors_held"]
    assert found.severity is Severity.ERROR
    assert found.evidence["names"] == ["last.weight", "last.bias"]


def test_once_the_optimizer_holds_them_it_is_over(runs):
    found = told(runs["ForgottenAtFirst"])["state.not_updated"]
    assert found.status == "closed"
    assert "They change again." in found.explanation


def test_what_one_worker_freezes_is_named(runs):
    found = told(runs["FrozenOnOneRank"])["roles-differ"]
    assert found.severity is Severity.ERROR
    assert found.evidence["names"] == ["last.bias"]
    assert "frozen on rank 1 alone" in found.explanation
