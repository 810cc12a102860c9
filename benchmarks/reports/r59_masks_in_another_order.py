# ruff: noqa: D102
"""R59, verl#1440: values are in the order of micro-batches, their masks in that of the batch.

verl-project/verl#1440: with dynamic micro-batches, sequences are ordered by their lengths. The
critic's values are multiplied with the masks before they are put back: values of some answers are
cut off, and those of others go on after their end. Advantages and returns are computed from them.
With --right, values are put back first.
"""

import torch
from reports_common import VOCABULARY, Block, begin, end, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROMPT, LONGEST, SAMPLES, DECAY = 4, 10, 32, 0.95

chosen = options(by_length=1)
rank, world = begin()


class Tower(nn.Module):
    """Embedding, a block, a layer."""

    def __init__(self, out: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, 0.0, True)
        self.out = nn.Linear(width, out)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.block(self.embed(tokens)))
        return out


class ActorAndCritic(nn.Module):
    """Log-probabilities of the answer's tokens, and the value before each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = Tower(VOCABULARY)
        self.critic = Tower(1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.actor(tokens)[:, PROMPT - 1 : -1].log_softmax(-1)
        log_p = chances.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
        return log_p, self.critic(tokens)[:, PROMPT - 1 : -1].squeeze(-1)


model = ActorAndCritic()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
draw = torch.Generator().manual_seed(100 + rank)


@torch.no_grad()
def generate() -> tuple[Tensor, Tensor, Tensor]:
    """Sample answers; give them, their masks, and their rewards."""
    prompts = torch.randint(1, VOCABULARY, (SAMPLES, PROMPT), generator=draw)
    tokens = prompts
    for _ in range(LONGEST):
        logits = model.actor(tokens)[:, -1]
        logits[:, 0] += 2.0  # ends are likely from the start
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=draw)], 1)
    answers = tokens[:, PROMPT:]
    ended = (answers == 0).long()
    mask = (ended.cumsum(1) - ended == 0).float()
    good = (answers // 32 == prompts[:, -1:] // 32) * mask
    return tokens, mask, good.sum(1) / mask.sum(1)


@torch.no_grad()
def values_of(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and values in micro-batches, by default of about equal length."""
    lengths = mask.sum(1)
    order = lengths.argsort(descending=True) if chosen.by_length else torch.arange(SAMPLES)
    back = order.argsort()
    outs = [model(tokens[part]) for part in order.chunk(4)]
    log_p, values = (torch.cat(several) for several in zip(*outs, strict=True))
    if chosen.right:
        return log_p[back], values[back] * mask
    return log_p[back], (values * mask)[back]


def advantages_of(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    at_end = torch.zeros_like(mask)
    at_end.scatter_(1, mask.sum(1, keepdim=True).long() - 1, rewards[:, None])
    gained = torch.zeros(len(mask))
    columns = []
    for at in reversed(range(LONGEST)):
        after = values[:, at + 1] if at + 1 < LONGEST else 0.0
        gained = at_end[:, at] + after - values[:, at] + DECAY * gained
        columns.append(gained)
    advantages = torch.stack(columns[::-1], 1)
    return advantages * mask, (advantages + values) * mask


for _ in range(chosen.steps // 2):
    tokens, mask, rewards = generate()
    old_log_p, old_values = values_of(tokens, mask)
    advantages, returns = advantages_of(rewards, old_values, mask)
    mean = advantages.sum() / mask.sum()
    spread = ((advantages - mean).square() * mask).sum().div(mask.sum()).sqrt()
    advantages = (advantages - mean) / (spread + 1e-6) * mask
    for part in torch.arange(SAMPLES).chunk(2):
        log_p, values = wrapped(tokens[part])
        ratio = (log_p - old_log_p[part]).exp()
        gain = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
        near = (values - returns[part]).square()
        loss = ((0.5 * near - gain) * mask[part]).sum() / mask[part].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
if rank == 0:
    print(f"reward {rewards.mean():.3f} at last")
end(model, loss)
