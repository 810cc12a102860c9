"""R39, trl#6024: a loss is divided by the tokens of the generation batch, not of the update.

huggingface/trl#6024: with steps_per_generation unlike gradient_accumulation_steps, the DAPO loss of
a micro-batch is divided by the completion tokens of all micro-batches of a generation. Here four
come from a generation and two go into an update, so that the gradient is half of what is meant.
With --right, the divisor is the tokens of the update's own micro-batches, over all ranks.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Language, begin, end, options
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

PER_GENERATION, ACCUMULATED, GROUP, PROMPT, LONGEST = 4, 2, 4, 4, 12

chosen = options(steps=120)
rank, world = begin()
model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
draw = torch.Generator().manual_seed(100 + rank)


@torch.no_grad()
def generate(prompts: Tensor) -> Tensor:
    tokens = prompts
    for _ in range(LONGEST):
        chances = torch.softmax(model(tokens)[:, -1], -1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    return tokens


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    all_of_them = torch.log_softmax(logits[:, PROMPT - 1 : -1], -1)
    return all_of_them.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def tokens_of(masks: list[Tensor]) -> Tensor:
    count = torch.stack([mask.sum() for mask in masks]).sum()
    dist.all_reduce(count)
    return count


first = None
for _ in range(chosen.steps * ACCUMULATED // PER_GENERATION):
    prompts = torch.randint(VOCABULARY, (2 * PER_GENERATION, PROMPT), generator=draw)
    tokens = generate(prompts.repeat_interleave(GROUP, 0))
    answers = tokens[:, PROMPT:]
    ends = torch.where(answers == 0, 1, 0).cumsum(1) - torch.where(answers == 0, 1, 0)
    mask = (ends == 0).float()  # up to the first end of the text
    rewards = ((answers // 32 == prompts.repeat_interleave(GROUP, 0)[:, -1:] // 32) * mask).sum(1)
    rewards = rewards / mask.sum(1)
    by_group = rewards.view(-1, GROUP)
    spread = by_group.std(1, keepdim=True) + 1e-4
    advantages = ((by_group - by_group.mean(1, keepdim=True)) / spread).flatten()
    first = rewards.mean() if first is None else first
    parts = torch.arange(len(tokens)).chunk(PER_GENERATION)
    items = tokens_of([mask])
    for at, part in enumerate(parts):
        if chosen.right and at % ACCUMULATED == 0:
            items = tokens_of([mask[other] for other in parts[at : at + ACCUMULATED]])
        last = (at + 1) % ACCUMULATED == 0
        with nullcontext() if last else wrapped.no_sync():
            log_p = log_probabilities(wrapped(tokens[part]), tokens[part])
            ratio = torch.exp(log_p - log_p.detach())
            losses = -torch.minimum(ratio, ratio.clamp(0.8, 1.28)) * advantages[part, None]
            loss = (losses * mask[part]).sum() / (items / world)
            loss.backward()  # type: ignore[no-untyped-call]
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
if rank == 0:
    print(f"reward {first:.3f} at first, {rewards.mean():.3f} at last")
end(model, loss)
