# ruff: noqa: D102
"""R12, open-unlearning#178: adapters inside of reentrant checkpoints never get a gradient."""

from typing import Any

import deepspeed
import torch
from reports_common import Adapted, Language, end, launched, next_token_loss, options, text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing
chosen = options(checkpointing=1)
rank, world = launched()
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        if chosen.checkpointing:
            out: Tensor = checkpoint(self.block, hidden, use_reentrant=True)
        else:
            out = self.block(hidden)
        return out


def need_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


model = Language().requires_grad_(False)
for at, block in enumerate(model.blocks):
    block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
    model.blocks[at] = Checkpointed(block)
model.head = Adapted(model.head)  # type: ignore[assignment]
if chosen.right:  # what enable_input_require_grads() does
    model.embed.register_forward_hook(need_gradient)
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(trained, lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    },
)
data = text(2048)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 2048 :][:8]
    loss = next_token_loss(engine(tokens), tokens)
    engine.backward(loss)
    engine.step()
end(model, loss)
