from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from support.findings import events_of
from support.loops import collect_warnings, watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, WORDS, AT, STEPS = 16, 24, 2, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.down(self.up(self.norm(hidden)).tanh())
        return self.head(hidden + self.middle(hidden).relu())


class PolarParts(torch.optim.Optimizer):
    """Sets the singular values of updates to 1, for matrices gathered over dp, but not over tp."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not hasattr(p, "device_mesh"):
                    p.sub_(polar(p.grad), alpha=group["lr"])
                    continue
                along = [Replicate(), *p.placements[1:]]
                update = polar(p.grad.redistribute(placements=along).to_local())
                own = update.chunk(p.device_mesh.size(0))[p.device_mesh.get_local_rank(0)]
                p.to_local().sub_(own, alpha=group["lr"])


class MomentsOfRows(torch.optim.Optimizer):
    """Has one second moment for each row of a matrix, and for the rank's own part of a vector."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own, gradient = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
                squares = gradient.square().mean(-1, keepdim=p.ndim > 1)
                moment = self.state[p].setdefault("moment", torch.zeros_like(squares))
                moment.lerp_(squares, 0.1)
                own.sub_(group["lr"] * gradient / (moment.sqrt() + 1e-8))


def polar(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def train(run_dir: str | None, one_asks: bool) -> list[bytes]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    by_polar = [model.up.weight, model.down.weight]
    by_muon = [model.middle.weight]
    by_rows = [*model.norm.parameters(), *model.head.parameters()]
    optimizers: list[Any] = [
        PolarParts(by_polar, {"lr": 1e-2}),
        torch.optim.Muon(by_muon, 1e-2),
        MomentsOfRows(by_rows, {"lr": 1e-2}),
        torch.optim.AdamW(model.embedding.parameters(), 1e-2),
    ]
    scope: Any = None
    if run_dir is not None:
        scope = watch(model, optimizers, run_dir=run_dir, verify_at=[] if one_asks else [AT])
    torch.manual_seed(100 + mesh["dp"].get_local_rank())
    for step in range(STEPS):
        if one_asks and step == AT and dist.get_rank():
            scope.verify()
        ids = torch.randint(WORDS, (4, 8))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if scope is not None:
        scope.close()
    states = [s for each in optimizers for of_one in each.state.values() for s in of_one.values()]
    tensors = [*model.parameters(), *states]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [t.detach().numpy().tobytes() for t in (*local, torch.get_rng_state())]


def work(rank: int, folder: str) -> list[str]:
    from rankscope.evidence.reference import probe as reference
    from rankscope.evidence.update import audit

    plain = train(None, one_asks=False)
    warnings = collect_warnings()
    assert train(f"{folder}/run", one_asks=False) == plain
    reference.AGREE_SECONDS = audit.AGREE_SECONDS = 1.0
    assert train(f"{folder}/one asks", one_asks=True) == plain
    return warnings


@pytest.fixture(scope="module", autouse=True)
def trained(folder: Path) -> None:
    assert run_ranks(work, 4, str(folder)) == [[]] * 4


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    runs = sorted(folder.glob(f"{name}*"))
    assert len(runs) == 2
    events = [event for run in runs for event in events_of(run)]
    return [event for event in events if event["cause"].startswith("update.")]


def test_matrices_that_are_updated_by_their_parts_are_named_and_no_others(folder: Path) -> None:
    for found in findings(folder, "run"):
        assert (found["cause"], found["severity"]) == ("update.differs", "warning")
        names = ["up.weight", "down.weight", "norm.weight", "norm.bias"]
        told = [row[:2] for row in found["evidence"]["parameters"]]
        assert told == [[name, "alone"] for name in names]
        said = "up.weight and down.weight: each rank updates its own part along tp"
        assert said in found["explanation"]


def test_a_rank_that_does_not_ask_stops_nobody(folder: Path) -> None:
    """The other coordinate of tp agrees on what it shares along dp alone."""
    found = {(f["cause"], f["explanation"]) for f in findings(folder, "one asks")}
    assert {cause for cause, _ in found} == {"update.declined", "update.differs"}
    assert any("of 4 ranks had come" in told for cause, told in found if "declined" in cause)
    assert all("up.weight" not in told for cause, told in found if "differs" in cause)
