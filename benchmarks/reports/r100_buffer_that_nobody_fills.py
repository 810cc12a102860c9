# ruff: noqa: D102
"""R100, LlamaFactory#10820: a buffer that no checkpoint holds keeps what lay in its memory.

hiyouga/LlamaFactory#10820: the first rank reads the model, the others make an empty one. All get
memory for their shards, and the parameters of the first rank. Buffers that are not saved, such as
frequencies of positions, are not among what it sends: they hold what the memory held. Here, these
are zeros, as new memory has.
With --right, such buffers are kept, and sent as well.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

GLOBAL_BATCH, LENGTH, WIDTH = 16, 24, 32

chosen = options()
rank, world = begin()


class Placed(Language):
    """A language model with waves of different lengths for the places."""

    waves: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH)
        lengths = 100.0 ** (torch.arange(WIDTH // 2) * 2 / WIDTH)
        turns = torch.arange(LENGTH)[:, None] / lengths
        waves = torch.cat([turns.sin(), turns.cos()], -1)
        self.register_buffer("waves", waves, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.waves
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def divided(read: Placed) -> Placed:
    """Make an empty model, divide it, and fill it with what was read."""
    with torch.device("meta"):
        model = Placed()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.waves.zero_()
        for parameter, filled in zip(model.parameters(), read.parameters(), strict=True):
            parameter.copy_(distribute_tensor(filled, mesh, parameter.placements))  # type: ignore[attr-defined]
        if chosen.right:
            model.waves.copy_(read.waves)
    return model


model = Placed()
if world > 1:
    model = divided(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
