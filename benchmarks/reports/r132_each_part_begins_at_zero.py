# ruff: noqa: D102
"""R132, torchtitan#3575: gradients are set to zero with each micro-batch, not with each update.

pytorch/torchtitan#3575: a trainer offers a forward and backward pass, and an update. The first one
sets gradients to zero before it begins: where it is called several times before an update, only
the last call counts.
With --right, the update does, after it is done.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH = 32

chosen = options(micro_batches=4)
rank, world = begin()


class Trainer:
    """What the loop of a reinforcement learner calls."""

    def __init__(self) -> None:
        self.model = Language()
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)

    def forward_backward(self, tokens: Tensor) -> Tensor:
        if not chosen.right:
            self.optimizer.zero_grad()
        loss = next_token_loss(self.model(tokens), tokens)
        (loss / chosen.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if chosen.right:
            self.optimizer.zero_grad()


trainer = Trainer()
data = text(8192)
rows = GLOBAL_BATCH // world // chosen.micro_batches
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 8192 :][:GLOBAL_BATCH]
    for micro in range(chosen.micro_batches):
        loss = trainer.forward_backward(batch[(micro * world + rank) * rows :][:rows])
    trainer.update()
end(trainer.model, loss)
