# ruff: noqa: D102
"""R38, nanoVLM#203: each loader process of a rank walks through the rank's whole stream.

huggingface/nanoVLM#203: a streaming data set is divided among ranks, not among the processes of a
loader. Each sample comes once per process, in batches that follow each other.
With --right, a process takes each second sample.
"""

from collections.abc import Iterator

import torch
from reports_common import VOCABULARY, Block, begin, end, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES = 1024

chosen = options(steps=128, processes=2)
rank, world = begin()


class Answers(IterableDataset[tuple[Tensor, Tensor]]):
    """Pictures of four patches and the answers that go with them, as a stream."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.answers = text(SAMPLES, length=12)
        seen = torch.randn(VOCABULARY, 4, 8, generator=draw)
        noise = torch.randn(SAMPLES, 4, 8, generator=draw)
        self.pictures = seen[self.answers[:, 0]] + 0.3 * noise
        self.epoch = 0

    def stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for at in order[rank::world].tolist():
            yield self.pictures[at], self.answers[at]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        process = get_worker_info()
        for at, sample in enumerate(self.stream()):
            if chosen.right and process and at % process.num_workers != process.id:
                continue
            yield sample


class Answerer(nn.Module):
    """Reads patches and the answer so far."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width))
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 0.0, True) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, patches: Tensor, answer: Tensor) -> Tensor:
        hidden = torch.cat([self.project(patches), self.embed(answer[:, :-1])], 1)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden[:, 3:]))
        return logits


data = Answers()
model = Answerer()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = 0
while step < chosen.steps:
    for pictures, answers in DataLoader(data, batch_size=8, num_workers=chosen.processes):
        logits = wrapped(pictures, answers)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step == chosen.steps:
            break
    data.epoch += 1
end(model, loss)
