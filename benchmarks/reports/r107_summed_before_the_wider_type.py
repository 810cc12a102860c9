# ruff: noqa: D102
"""R107, Megatron-LM#6624: gradients are summed over ranks in 16 bits, and then kept in 32.

NVIDIA/Megatron-LM#6624: the training asks for sums in float32. Weights are divided among the ranks;
the gradient of a micro-batch has the type of the computation, bfloat16, when it is summed and
divided, and is added to an accumulator of float32 after that.
With --right, the sum over ranks is of float32, too.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

GLOBAL_BATCH = 32

chosen = options(micro_batches=4)
rank, world = begin()


class Half(Language):
    """A language model that computes in bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens).float()


model = Half()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    summed_in = torch.float32 if chosen.right else torch.bfloat16
    policy = MixedPrecisionPolicy(reduce_dtype=summed_in)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    for tokens in batch.chunk(world)[rank].chunk(chosen.micro_batches):
        loss = next_token_loss(model(tokens), tokens)
        (loss / chosen.micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
