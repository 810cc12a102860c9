"""R52, prime-rl#600: advantages are relative to answers to other prompts.

PrimeIntellect-ai/prime-rl#600: prompts are repeated as a, b, a, b, but groups are cut from the list
as if they were a, a, b, b. So each answer is compared with those to other prompts: an easy prompt
gets a high advantage whatever the answer, a hard one a low one.
With --right, each prompt is repeated in place.
"""

import torch
from reports_common import VOCABULARY, Language, begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PROMPTS, ANSWERS, PROMPT, LONG = 4, 8, 4, 10

chosen = options(steps=110)
rank, world = begin()
model = Language()
mesh = init_device_mesh("cpu", (world,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
engine = Language()  # the copy that answers
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
draw = torch.Generator().manual_seed(200 + rank)


def send_weights() -> None:
    """Give the engine the trained weights, as after each update."""
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    engine.load_state_dict(whole)


@torch.no_grad()
def answer(prompts: Tensor) -> Tensor:
    tokens = prompts
    for _ in range(LONG):
        chances = torch.softmax(engine(tokens)[:, -1], -1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    return tokens


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    all_of_them = torch.log_softmax(logits[:, PROMPT - 1 : -1], -1)
    return all_of_them.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def reward(tokens: Tensor) -> Tensor:
    """Half of the tokens are right for even prompts, an eighth of them, the last, for odd ones."""
    answers, odd = tokens[:, PROMPT:], tokens[:, PROMPT - 1 : PROMPT] % 2 == 1
    return torch.where(odd, answers >= 56, answers < 32).float().mean(1)


for step in range(chosen.steps):
    send_weights()
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=draw)
    tokens = answer(
        prompts.repeat_interleave(ANSWERS, 0) if chosen.right else prompts.repeat(ANSWERS, 1)
    )
    rewards = reward(tokens)
    groups = rewards.view(PROMPTS, ANSWERS)
    spread = groups.std(1, keepdim=True) + 1e-6
    advantages = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()
    log_p = log_probabilities(model(tokens), tokens)
    ratio = torch.exp(log_p - log_p.detach())
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -gain.mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 20 == 0:
        print(f"step {step}: mean reward {rewards.mean():.3f}")
end(model, loss)
