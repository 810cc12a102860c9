"""R103, datasets#7447: after a restart, every epoch is what was left of the interrupted one.

huggingface/datasets#7447: a stream is given the place at which it was interrupted. The process that
reads it keeps that for the whole training: later epochs begin there as well, and the samples before
that place are never seen again.
With --right, the place is forgotten when the first epoch is over.
Launch it twice with the same --folder: the first launch saves after its steps.
"""

from collections.abc import Iterator

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH, EPOCH = 16, 5  # updates of an epoch

chosen = options(steps=42)
rank, world = begin()


class Stream(IterableDataset[Tensor]):
    """A rank's part of each batch of an epoch, from a place on."""

    def __init__(self, step: int) -> None:
        self.samples = text(GLOBAL_BATCH * EPOCH)
        self.epoch, self.place = divmod(step, EPOCH)

    def __iter__(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.samples), generator=draw)
        for batch in order.chunk(EPOCH)[self.place :]:
            yield self.samples[batch.chunk(world)[rank]]
        self.epoch += 1
        if chosen.right:
            self.place = 0


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
start = 0
saved = chosen.folder / f"rank{rank}.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
loader = DataLoader(Stream(start), batch_size=None, num_workers=1, persistent_workers=True)
batches = iter(loader)
for _ in range(chosen.steps):
    tokens = next(batches, None)
    if tokens is None:
        batches = iter(loader)
        tokens = next(batches)
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved is not None:
    saved.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": start + chosen.steps}, saved)
end(model, loss)
