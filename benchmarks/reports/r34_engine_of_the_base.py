"""R34, verl#7014: merged weights are read after they were restored: rollouts of the base."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from reports_common import Adapted, Language, begin, end, options, text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROMPT, ANSWER = 4, 6

chosen = options()
rank, world = begin()


def adapted(model: Language) -> Language:
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
    model.head = Adapted(model.head)  # type: ignore[assignment]
    return model


base = Language()
engine = Language()  # generates; has no adapters
engine.load_state_dict(base.state_dict())
engine.requires_grad_(False).eval()
model = adapted(base)
wrapped = DistributedDataParallel(model)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)


@contextmanager
def merged() -> Iterator[None]:
    """Add the adapters to the weights for a while."""
    layers = [m for m in model.modules() if isinstance(m, Adapted)]
    kept = [layer.layer.weight.clone() for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.layer.weight += 4 * layer.lora_out.weight @ layer.lora_in.weight
        yield
        for layer, weight in zip(layers, kept, strict=True):
            layer.layer.weight.copy_(weight)


def weights() -> Iterator[tuple[str, Tensor]]:
    """Name each weight for the engine."""
    if chosen.right:
        with merged():
            yield from named()
    else:
        with merged():
            lazy = named()
        yield from lazy


def named() -> Iterator[tuple[str, Tensor]]:
    for name, weight in model.state_dict().items():
        if "lora" not in name:
            yield name.replace(".layer.", "."), weight


@torch.no_grad()
def roll_out(prompts: Tensor) -> Tensor:
    for name, weight in weights():
        engine.get_parameter(name).copy_(weight)
    tokens = prompts
    for _ in range(ANSWER):
        drawn = torch.multinomial(engine(tokens)[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens


def log_probabilities(actor: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = actor(tokens)[:, PROMPT - 1 : -1].log_softmax(-1)
    return logits.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


torch.manual_seed(50 + rank)
data = text(4096, length=PROMPT)
total = 0.0
for step in range(chosen.steps):
    tokens = roll_out(data[(step * world + rank) * 16 % 4096 :][:16])
    hit = (tokens[:, PROMPT:] // 16 == tokens[:, PROMPT - 1 : -1] // 16).float()
    reward = hit.mean(1)
    total += reward.mean().item()
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    now = log_probabilities(wrapped, tokens)
    ratio = (now - now.detach()).exp()  # one update of each batch
    loss = -(ratio * advantage[:, None]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"mean reward {total / chosen.steps:.4f}, at the end {reward.mean().item():.4f}")
end(model, loss)
