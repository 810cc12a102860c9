import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import watch
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

STEPS, AT = 10, 5
SAYS = {
    # what a loop does: samples of a step, different ones, and what a reference step answers
    "methods": (32, 32, "verify.agrees"),
    "methods, sums": (32, 32, "verify.scale"),
    "methods, equal rows": (32, 16, "verify.agrees"),
    "parts": (32, 32, "verify.agrees"),
    "tables": (None, None, "verify.agrees"),
    "loaded": (32, 32, "verify.agrees"),
    "loaded, halves": (32, 32, "verify.agrees"),
    "loaded, equal rows": (32, 16, "verify.agrees"),
}


class Agent(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table = way, nn.Parameter(torch.randn(6, 8))
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2))
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def evaluate(self, rows: torch.Tensor) -> torch.Tensor:
        if "loaded" in self.way:
            rows = rows + torch.randn_like(rows)
        hidden = rows @ self.table if self.way == "tables" else self.body(rows)
        hidden = torch.relu_(hidden) * self.table.mean(dim=0)
        return self.actor(hidden).logsumexp(dim=1) + self.critic(hidden)[:, 0].square()


def train(rank: int, way: str, run_dir: str | None) -> list[float]:
    torch.manual_seed(0)
    agent = Agent(way)
    data = TensorDataset(torch.randn(32 * STEPS, 6))
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    keep = {"canary": False, "verify_at": [AT]}
    scope = watch(agent, optimizer, run_dir=run_dir, **keep) if run_dir else None
    torch.manual_seed(1 + rank)
    shard = range(16 * STEPS * rank * ("equal" not in way), 32 * STEPS)
    batches = iter(DataLoader(data, 16, sampler=shard)) if "loaded" in way else None
    for step in range(STEPS):
        own = shard[16 * step : 16 * step + 16]
        rows = data.tensors[0][list(own)] if batches is None else next(batches)[0]
        halves = 1 + ("halves" in way)
        for half in rows.chunk(halves):
            parts = way == "parts"
            found = agent.critic(agent.body(half)) if parts else agent.evaluate(half)
            (found.mean() / halves).backward()
        for parameter in agent.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if "sums" in way else dist.get_world_size()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    return [p.double().sum().item() for p in agent.parameters()]


trained = alone_and_watched(train, SAYS, 2)


@pytest.mark.parametrize("way", SAYS)
def test_samples_are_known_and_the_gradient_is_checked_without_a_forward_pass(trained, way):
    results, folder = trained
    assert all(alone == watched for alone, watched in (rank[way] for rank in results))
    run = Run.open(folder / way)
    drawn, distinct, answer = SAYS[way]
    columns = run.columns(Table.STEPS, "samples_drawn", "samples_distinct")
    for name, expected in (("samples_drawn", drawn), ("samples_distinct", distinct)):
        known = columns[name][columns[name] > 0]
        assert set(known.tolist()) == ({expected} if expected else set())
        assert len(known) >= (STEPS - 2 if expected else 0)
    [found] = [f for f in run.findings() if f.cause.startswith("verify.")]
    assert found.cause == answer, found.explanation
    assert any(f.cause == "data.duplicate_batches" for f in run.findings()) == ("equal" in way)
