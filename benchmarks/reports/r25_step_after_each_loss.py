# ruff: noqa: D102
"""R25, Helios#130: a critic has two losses, and DeepSpeed steps after the backward of each."""

import deepspeed
import torch
from reports_common import VOCABULARY, Language, end, launched, next_token_loss, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing
chosen = options(deepspeed=1)
rank, world = launched()
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)


class Critic(nn.Module):
    """Predicts tokens, and tells real sequences from invented ones."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language()
        self.judge = nn.Sequential(nn.Linear(VOCABULARY, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.language(tokens)
        return logits, self.judge(logits.mean(1))


model = Critic()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
if chosen.deepspeed:
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000,
        },
    )
else:
    engine = DistributedDataParallel(model, find_unused_parameters=True)


def backward(loss: Tensor, last: bool) -> None:
    """Accelerate's wrapper calls step after every backward; the repaired loop only at the end.

    Without DeepSpeed, the loop steps at the end in both.
    """
    if not chosen.deepspeed:
        loss.backward()  # type: ignore[no-untyped-call]
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return
    if chosen.right:
        engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss)
    if last or not chosen.right:
        engine.step()


data = text(2048)
draw = torch.Generator().manual_seed(10 + rank)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 2048 :][:8]
    invented = torch.randint(VOCABULARY, tokens.shape, generator=draw)
    loss = next_token_loss(engine(tokens)[0], tokens)
    backward(loss, last=False)
    scores = engine(torch.cat([tokens, invented]))[1]
    truth = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
    backward(0.2 * F.binary_cross_entropy_with_logits(scores, truth), last=True)
end(model, loss)
