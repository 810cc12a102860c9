"""R66, miles#1829: a rollout is one update old, and its log-probabilities are those of today.

radixark/miles#1829: the next rollout begins before the actor trains on this one. The ratio's
denominator is computed again by the actor, so that the clipping is about a policy that has not
written the answers, and nothing corrects for the one that has.
With --right, the denominator is what the rollout engine has recorded.
"""

from copy import deepcopy

import torch
from reports_common import VOCABULARY, Language, begin, end, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROMPTS, GROUP, PROMPT, LONGEST, PARTS = 8, 4, 4, 8, 4

chosen = options()
rank, world = begin()
model = Language()
engine = deepcopy(model).requires_grad_(False)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
draw = torch.Generator().manual_seed(100 + rank)


def log_probabilities(policy: nn.Module, tokens: Tensor) -> Tensor:
    chances = policy(tokens)[:, PROMPT - 1 : -1].log_softmax(-1)
    log_p: Tensor = chances.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    return log_p


@torch.no_grad()
def roll_out() -> tuple[Tensor, Tensor, Tensor]:
    """Let the engine answer; give the texts, its log-probabilities, and the rewards."""
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=draw)
    tokens = prompts.repeat_interleave(GROUP, 0)
    for _ in range(LONGEST):
        chances = engine(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    half = tokens[:, PROMPT - 1 : PROMPT] // 32
    rewards = (tokens[:, PROMPT:] // 32 == half).float().mean(1)
    return tokens, log_probabilities(engine, tokens), rewards


ahead = roll_out()
for _ in range(chosen.steps // PARTS):
    tokens, old_log_p, rewards = ahead
    ahead = roll_out()
    by_group = rewards.view(-1, GROUP)
    spread = by_group.std(1, keepdim=True) + 1e-4
    advantages = ((by_group - by_group.mean(1, keepdim=True)) / spread).flatten()
    if not chosen.right:
        with torch.no_grad():
            old_log_p = log_probabilities(model, tokens)
    for part in torch.arange(len(tokens)).chunk(PARTS):
        ratio = (log_probabilities(wrapped, tokens[part]) - old_log_p[part]).exp()
        gain = advantages[part, None]
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.load_state_dict(model.state_dict())
if rank == 0:
    print(f"reward {rewards.mean():.3f} at last")
end(model, loss)
