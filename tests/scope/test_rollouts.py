"""A small loop of reinforcement learning on four real ranks, whose engines draw the completions."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.finding import Severity
from support.loops import collect_warnings
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

RANKS, FAULTY, FIRST, STEPS = 4, 2, 20, 45
NUM_TOKENS, SAMPLES, LENGTH, WANTED = 32, 16, 12, 5


class Policy(nn.Module):
    """Says how probable each next token is, given the last one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 16)
        self.head = nn.Linear(16, NUM_TOKENS)

    def forward(self, ids):
        return F.log_softmax(self.head(self.embedding(ids)).float(), dim=-1)


def draw(engine, prompts):
    """Return what an engine draws after the prompts, and how probable it says that was."""
    tokens, logps = prompts[:, None], []
    for _ in range(LENGTH):
        next_logps = engine(tokens[:, -1])
        drawn = torch.multinomial(next_logps.exp(), 1)
        logps.append(next_logps.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens, torch.cat(logps, dim=1)


def train(rank, run_dir=None, *, fault=False):
    """Train; from one step on, the engine of one rank gets no new weights if there is a fault.

    Returns:
        Every bit of what was trained, the gap of each step in float64, and warnings.
    """
    torch.manual_seed(0)
    policy = Policy()
    ddp = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-2)
    engine = copy.deepcopy(policy).bfloat16()  # as an engine of another precision
    torch.manual_seed(100 + rank)
    warnings, gaps, scope = collect_warnings(), [], None
    if run_dir is not None:
        options = {"overhead_budget": None, "announce": False, "canary": False}
        scope = rankscope.watch(ddp, optimizer, run_dir=run_dir, **options)
    for step in range(STEPS):
        if not (fault and rank == FAULTY and step >= FIRST):
            engine.load_state_dict(policy.state_dict())
        with torch.no_grad():
            tokens, rollout_logps = draw(engine, torch.randint(NUM_TOKENS, (SAMPLES,)))
        rewards = (tokens[:, 1:] == WANTED).float().sum(dim=1)
        mask = torch.rand(SAMPLES, LENGTH) < 0.8
        logps = ddp(tokens[:, :-1]).gather(2, tokens[:, 1:, None]).squeeze(2)
        loss = -((rewards - rewards.mean())[:, None] * logps)[mask].mean()
        if scope is not None:
            scope.loss(loss.detach())
            scope.rollout(logps, rollout_logps, mask)
        if scope is not None and step == 3:
            scope.rollout(logps, rollout_logps.tolist())
        apart = np.abs(logps.detach().double().numpy() - rollout_logps.double().numpy())
        gaps.append(apart[mask.numpy()].mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    bits = [each.numpy().tobytes() for each in [*policy.state_dict().values(), torch.randn(4)]]
    return bits, gaps, list(warnings)


def work(rank, folder):
    return {
        "unwatched": train(rank),
        "healthy": train(rank, f"{folder}/healthy"),
        "stale": train(rank, f"{folder}/stale", fault=True),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    return folder, run_ranks(work, RANKS, str(folder))


@pytest.mark.parametrize("name", ["healthy", "stale"])
def test_the_gap_of_every_step_is_recorded(trained, name):
    folder, ranks = trained
    _, gaps_TW = Run.open(folder / name).per_worker("rollout_gap")
    expected_TW = np.array([rank[name][1] for rank in ranks]).T
    np.testing.assert_allclose(gaps_TW, expected_TW, rtol=1e-5)


def test_healthy_engines_are_silent_and_no_bit_of_the_training_changes(trained):
    folder, ranks = trained
    assert not [f for f in Run.open(folder / "healthy").findings() if f.cause.startswith("rollout")]
    for rank in ranks:
        assert rank["healthy"][0] == rank["unwatched"][0]
        (line,) = rank["healthy"][2]
        assert "it got a list" in line


def test_the_worker_whose_engine_gets_no_weights_is_named_within_30_steps(trained):
    folder, _ = trained
    findings = [f for f in Run.open(folder / "stale").findings() if f.severity > Severity.NOTE]
    (found,) = [f for f in findings if f.cause.startswith("rollout")]
    assert (found.cause, found.ranks) == ("rollout.worker_outlier", (FAULTY,))
    assert FIRST <= found.first_step <= FIRST + 15
    assert "rollout engine" in found.explanation
    lines = (folder / "stale" / "findings.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert min(each["step"] for each in events if each["id"] == found.id) < FIRST + 30
