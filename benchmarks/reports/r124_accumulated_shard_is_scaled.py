# ruff: noqa: D102
"""R124, Megatron-LM#3023: what was accumulated is divided by the workers, what is added is not.

NVIDIA/Megatron-LM#3023: each rank keeps its shard of the gradients of an update. Before a
micro-batch's gradient is added, the shard is divided by the number of workers, instead of the
bucket that is reduced: the last micro-batch counts as a sum over the workers, the ones before it
are divided again and again.
With --right, the bucket is divided.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn

GLOBAL_BATCH = 32

chosen = options(micro_batches=4)
rank, world = begin()


class Shards:
    """Each rank's part of all parameters, and of their gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        whole = self.flat(self.parameters)
        self.length = -(-len(whole) // world)
        self.padded = self.length * world
        mine = self.pad(whole)[rank * self.length :][: self.length]
        self.shard = nn.Parameter(mine.clone())
        self.shard.grad = torch.zeros_like(self.shard)

    def flat(self, tensors: list[nn.Parameter] | list[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    def pad(self, whole: Tensor) -> Tensor:
        return torch.cat([whole, whole.new_zeros(self.padded - len(whole))])

    def add_gradients(self) -> None:
        """Reduce a micro-batch's gradients, and add this rank's part to what it has."""
        bucket = self.pad(self.flat([p.grad for p in self.parameters if p.grad is not None]))
        gradient = self.shard.grad
        assert gradient is not None
        (bucket if chosen.right else gradient).div_(world)
        if world > 1:
            dist.all_reduce(bucket)
        gradient.add_(bucket[rank * self.length :][: self.length])
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Give all ranks the new parameters."""
        parts = [torch.empty(self.length) for _ in range(world)]
        if world > 1:
            dist.all_gather(parts, self.shard.detach())
        else:
            parts = [self.shard.detach()]
        sizes = [p.numel() for p in self.parameters]
        news = torch.cat(parts)[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        for parameter, new in zip(self.parameters, news, strict=True):
            parameter.copy_(new.view_as(parameter))


model = Language()
shards = Shards(model)
optimizer = torch.optim.AdamW([shards.shard], lr=3e-3, weight_decay=0.0)
data = text(8192)
rows = GLOBAL_BATCH // world // chosen.micro_batches
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 8192 :][:GLOBAL_BATCH]
    for micro in range(chosen.micro_batches):
        tokens = batch[(micro * world + rank) * rows :][:rows]
        loss = next_token_loss(model(tokens), tokens)
        (loss / chosen.micro_batches).backward()
        shards.add_gradients()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    shards.gather()
end(model, loss)
