"""R151, datasets#7868: a mixture of streams that were divided over the ranks is not divided.

huggingface/datasets#7868: each stream is divided over the ranks, then they are mixed by chance,
with one seed on all ranks. The mixture is made of the streams' examples, and the division is kept
beside these: every rank draws the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SAMPLES = 4

chosen = options()
rank, world = begin()


@dataclass
class Stream(IterableDataset[Tensor]):
    """Examples, and which of them are this rank's."""

    rows: list[Tensor]
    place: tuple[int, int] = (0, 1)

    def __iter__(self) -> Iterator[Tensor]:
        first, every = self.place
        yield from self.rows[first::every]


def split_by_rank(stream: Stream) -> Stream:
    return replace(stream, place=(rank, world))


def mix(streams: list[Stream], seed: int) -> Stream:
    """Draw from the streams in turn, by chance, until one of them ends."""
    draw = torch.Generator().manual_seed(seed)
    left = [list(stream.rows) for stream in streams]
    rows = []
    while all(left):
        which = int(torch.randint(len(left), (), generator=draw))
        rows.append(left[which].pop(0))
    return Stream(rows, streams[0].place if chosen.right else (0, 1))


model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
streams = [split_by_rank(Stream(list(text(600, seed=seed)))) for seed in (1, 2)]
loader = DataLoader(mix(streams, seed=42), batch_size=SAMPLES, drop_last=True)
for step, tokens in enumerate(loader):
    if step == chosen.steps:
        break
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
