# ruff: noqa: D102
"""R54, accelerate#3938: the loader's state is corrected for its look-ahead once per process.

huggingface/accelerate#3938: a sharded loader reads one batch ahead, and takes that back when its
state is saved. It takes back one batch for each process, so that with two processes each of them
trains its last batch again after a resume.
With --right, it takes back the one batch that it has read and not given.
Launch it twice with the same --folder: the first launch stops after its steps.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8

chosen = options()
rank, world = begin()


class AheadLoader:
    """Reads a batch before the one before it is used, to know which is the last."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.sampler: DistributedSampler[Tensor] = DistributedSampler(
            data,  # type: ignore[arg-type]
            num_replicas=world,
            rank=rank,
            seed=7,
        )
        self.fetched = 0

    def state(self) -> int:
        return self.fetched - (1 if chosen.right else world)

    def batches(self, begin_at: int) -> Iterator[Tensor]:
        order = list(self.sampler)[begin_at * BATCH :]
        self.fetched = begin_at
        ahead = None
        for batch in DataLoader(Subset(self.data, order), BATCH, drop_last=True):  # type: ignore[arg-type]
            self.fetched += 1
            if ahead is not None:
                yield ahead
            ahead = batch
        if ahead is not None:
            yield ahead


model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = AheadLoader(text(4096))
start = 0
saved = chosen.folder / f"rank{rank}.pt"
if saved.exists():
    state = torch.load(saved)
    start = state["batches"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for number, tokens in enumerate(loader.batches(start), 1):
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    if number == chosen.steps:
        break
torch.save(
    {
        "batches": loader.state(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    saved,
)
dist.barrier()
end(model, loss)
