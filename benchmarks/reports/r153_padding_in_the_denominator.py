# ruff: noqa: D102
"""R153, rllm#508: the loss is divided by the tokens of rows that fill up the batch as well.

rllm-org/rllm#508: agents take different numbers of turns, and each turn is a row. Rows are added so
that the batch can be divided; their advantages are 0, but their tokens count in the number that the
loss is divided by. The gradient shrinks by their share, which is other in each step.
With --right, their mask is empty.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PROMPT, ANSWER, GROUPS, GROUP, MULTIPLE = 4, 8, 4, 4, 16

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
def rollout(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample turns of one controller; give them, what of them are answers, and advantages."""
    draw = torch.Generator().manual_seed(1000 + step)
    tokens = prompts[step * GROUPS % len(prompts) :][:GROUPS].repeat_interleave(GROUP, 0)
    turns = 1 + (torch.rand(len(tokens), generator=draw) < 0.2).long()
    for _ in range(ANSWER):
        chances = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    answers, last = tokens[:, PROMPT:], tokens[:, PROMPT - 1 : PROMPT]
    rewards = (answers // 16 == last // 16).float().mean(1).view(GROUPS, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    lengths = torch.randint(4, ANSWER + 1, (len(tokens), 1), generator=draw)
    mask = (torch.arange(ANSWER) < lengths).float()
    return (
        tokens.repeat_interleave(turns, 0),
        mask.repeat_interleave(turns, 0),
        advantages.repeat_interleave(turns),
    )


model = Policy()
if world > 1:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
prompts = text(1024, PROMPT)
for step in range(chosen.steps):
    tokens, mask, advantages = rollout(step)
    missing = -len(tokens) % MULTIPLE
    tokens = torch.cat([tokens, tokens[:1].expand(missing, -1)])
    filling = torch.zeros_like(mask[:1]) if chosen.right else mask[:1]
    mask = torch.cat([mask, filling.expand(missing, -1)])
    advantages = torch.cat([advantages, torch.zeros(missing)])
    own, counted, weights = (whole.chunk(world)[rank] for whole in (tokens, mask, advantages))
    log_p = model(own)[:, PROMPT - 1 : -1].log_softmax(-1)
    taken = log_p.gather(-1, own[:, PROMPT:, None]).squeeze(-1)
    gains = (taken - taken.detach()).exp() * weights[:, None]
    loss = -world * (gains * counted).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if not dist.is_initialized() or rank == 0:
    print(f"{len(tokens)} rows, {missing} of them fill up, at last")
end(model, loss)
