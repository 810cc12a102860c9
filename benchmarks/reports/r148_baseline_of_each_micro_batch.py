# ruff: noqa: D102
"""R148, trl#7265: the micro-batches of one update are compared with different baselines.

huggingface/trl#7265: BCO keeps a running mean of all rewards, of chosen and rejected answers and of
all ranks, and updates it in each computation of the loss. With accumulation, each micro-batch of an
update has another baseline: the gradient depends on how the batch is cut.
With --right, it is updated once, from the rewards of all micro-batches of the update.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, text
from reports_layouts import begin, data_parallel, end, not_reduced, options
from torch import Tensor, nn
from torch.nn import functional as F

PROMPT, ANSWER, BATCH, BETA = 6, 8, 16, 0.5

chosen = options(micro_batches=4)
rank, world = begin()


class Policy(nn.Module):
    """The log-probability of an answer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, 0.0, True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        log_p = self.head(self.block(self.embed(tokens)))[:, PROMPT - 1 : -1].log_softmax(-1)
        out: Tensor = log_p.gather(-1, tokens[:, PROMPT:, None]).sum((1, 2))
        return out


class RunningMean:
    """The mean of all rewards so far, over all ranks."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(()), 1e-4

    def update(self, rewards: Tensor) -> None:
        moments = torch.stack([rewards.sum(), torch.tensor(float(len(rewards)))])
        if dist.is_initialized():
            dist.all_reduce(moments)
        self.count += moments[1].item()
        self.mean = self.mean + (moments[0] - moments[1] * self.mean) / self.count


model, reference = Policy(), Policy()
reference.load_state_dict(model.state_dict())
wrapped = data_parallel(model)
running = RunningMean()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
good = text(2048, PROMPT + ANSWER)
noise = torch.randint(VOCABULARY, (2048, ANSWER), generator=torch.Generator().manual_seed(5))
bad = torch.cat([good[:, :PROMPT], noise], 1)


def rewards_of(policy: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Give the rewards of chosen and rejected answers."""
    pairs = torch.cat([good[rows], bad[rows]])
    with torch.no_grad():
        before = reference(pairs)
    wanted, unwanted = (BETA * (policy(pairs) - before)).chunk(2)
    return wanted, unwanted


for step in range(chosen.steps):
    rows = torch.arange(step * BATCH, (step + 1) * BATCH) % 2048
    parts = rows.chunk(world)[rank].chunk(chosen.micro_batches)
    if chosen.right:
        with torch.no_grad():
            running.update(torch.cat([torch.cat(rewards_of(model, part)) for part in parts]))
    for number, part in enumerate(parts):
        with not_reduced(wrapped, last=number == len(parts) - 1):
            wanted, unwanted = rewards_of(wrapped, part)
            if not chosen.right:
                running.update(torch.cat([wanted, unwanted]).detach())
            loss = -F.logsigmoid(wanted - running.mean).mean()
            loss = loss - F.logsigmoid(running.mean - unwanted).mean()
            (loss / len(parts)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
