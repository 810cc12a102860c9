"""R102, TorchEasyRec#544: the processes that read start before they are given their place.

alibaba/TorchEasyRec#544: after a restart the data set is given the place at which reading stopped.
The loader's processes live for the whole training, and were started when the loader was made: they
have a copy of the data set from before, and read from the first row.
With --right, the place is given before the processes start.
Launch it twice with the same --folder: the first launch saves after its steps.
"""

from collections.abc import Iterator

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH, SAMPLES = 16, 4096

chosen = options(steps=40)
rank, world = begin()


class Rows(IterableDataset[Tensor]):
    """A rank's part of each batch, from a place on."""

    def __init__(self) -> None:
        self.rows = text(SAMPLES)
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        for first in range(self.place, SAMPLES, GLOBAL_BATCH):
            yield self.rows[first : first + GLOBAL_BATCH].chunk(world)[rank]


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
rows = Rows()
place = 0
saved = chosen.folder / f"rank{rank}.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    place = state["place"]
if chosen.right:
    rows.place = place
loader = DataLoader(rows, batch_size=None, num_workers=1, persistent_workers=True)
batches = iter(loader)
rows.place = place
for _ in range(chosen.steps):
    tokens = next(batches)
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    place += GLOBAL_BATCH
if saved is not None:
    saved.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}
    torch.save(state, saved)
end(model, loss)
