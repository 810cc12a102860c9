# ruff: noqa: D102
"""R61, Megatron-DeepSpeed#276: the loader draws a random number, on the first rank alone.

bigscience-workshop/Megatron-DeepSpeed#276: only the first rank of tensor parallelism has a loader,
and sends its batches to the others. Each iterator draws a seed from the global generator: the
masks of dropout then differ between ranks that should have the same.
Four ranks: two of tensor parallelism, two of data parallelism. One process has whole layers.
With --right, the loader has a generator of its own.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, enter, next_token_loss, options, sum_over, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

LENGTH = 24

chosen = options(samples=8)
BATCH = chosen.samples
rank, world = begin()
PARTS = min(2, world)
mesh = init_device_mesh("cpu", (world // PARTS, PARTS), mesh_dim_names=("dp", "tp"))
group, place = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
worker = mesh["dp"].get_local_rank()


class Divided(nn.Module):
    """A residual layer whose inner half is on this rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        up, down = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(up.weight.detach().chunk(PARTS, 0)[place].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(PARTS, 1)[place].clone())
        self.bias = nn.Parameter(torch.zeros(width))
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        wide = F.gelu(enter(torch.cat([here, before], -1), group) @ self.up.T)
        out: Tensor = self.dropout(sum_over(wide @ self.down.T, group) + self.bias)
        return hidden + out


class Model(nn.Module):
    """Embedding with dropout, two divided layers, head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.ModuleList(Divided(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embed(tokens))
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def batches() -> Iterator[Tensor]:
    """Read on the first rank of tensor parallelism, and send to the other."""
    data = text(256, LENGTH)
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        data,  # type: ignore[arg-type]
        num_replicas=world // PARTS,
        rank=worker,
    )
    own = torch.Generator() if chosen.right else None
    loader = DataLoader(data, BATCH, sampler=sampler, generator=own)  # type: ignore[arg-type, var-annotated]
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        read = iter(loader) if place == 0 else None
        for _ in range(len(loader)):
            batch = torch.empty(BATCH, LENGTH, dtype=torch.long) if read is None else next(read)
            dist.broadcast(batch, group=group, group_src=0)
            yield batch
        epoch += 1


model = Model()
wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(1000 + worker)
source = batches()
for _ in range(chosen.steps):
    tokens = next(source)
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
