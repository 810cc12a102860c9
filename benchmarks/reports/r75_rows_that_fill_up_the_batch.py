# ruff: noqa: D102
"""R75, Agent-R1#88: rows that were added so that the batch can be divided are trained as well.

AgentR1/Agent-R1#88: some sessions of a rollout fail, so that the number of answers is seldom one
that the ranks can share. The batch is filled up with copies of its first rows, and these count as
any other: the gradient is biased to them, and depends on the number of ranks.
With --right, they are marked, count nothing, and losses are divided by the rows that are real.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PROMPT, ANSWER, GROUPS, GROUP = 4, 8, 8, 4

chosen = options()
rank, world = begin()


class Policy(nn.Module):
    """Embedding, a block, head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, 0.0, True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embed(tokens)))
        return logits


@torch.no_grad()
def rollout(step: int) -> tuple[Tensor, Tensor]:
    """Sample answers of one controller to eight prompts; give those that did not fail."""
    draw = torch.Generator().manual_seed(1000 + step)
    tokens = prompts[step * GROUPS % len(prompts) :][:GROUPS].repeat_interleave(GROUP, 0)
    for _ in range(ANSWER):
        chances = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    answers, last = tokens[:, PROMPT:], tokens[:, PROMPT - 1 : PROMPT]
    rewards = (answers // 16 == last // 16).float().mean(1).view(GROUPS, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    there = torch.rand(len(tokens), generator=draw) > 0.15
    return tokens[there], advantages[there]


model = Policy()
if world > 1:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
prompts = text(1024, PROMPT)
for step in range(chosen.steps):
    tokens, advantages = rollout(step)
    real = torch.ones(len(tokens))
    missing = -len(tokens) % world
    tokens = torch.cat([tokens, tokens[:missing]])
    advantages = torch.cat([advantages, advantages[:missing]])
    real = torch.cat([real, torch.zeros(missing)])
    own, weights, counted = (whole.chunk(world)[rank] for whole in (tokens, advantages, real))
    log_p = model(own)[:, PROMPT - 1 : -1].log_softmax(-1)
    taken = log_p.gather(-1, own[:, PROMPT:, None]).squeeze(-1)
    gains = ((taken - taken.detach()).exp() * weights[:, None]).mean(1)
    share = counted * world / real.sum() if chosen.right else torch.full_like(counted, 1 / len(own))
    loss = -(gains * share).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if not dist.is_initialized() or rank == 0:
    print(f"advantages of {len(tokens)} rows, {missing} of them copies, at last")
end(model, loss)
