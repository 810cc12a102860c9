"""A plain DDP script with two lines for rankscope, marked by arrows.

Healthy, on 4 workers:

    torchrun --nproc-per-node 4 examples/ddp_two_lines.py
    rankscope report runs/two-lines

With the most common of silent faults, a sampler that was forgotten, so that every worker trains
on the same data (the loss curve looks just as good):

    torchrun --nproc-per-node 4 examples/ddp_two_lines.py --forget-sampler --run-dir runs/fault
    rankscope report runs/fault
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import rankscope

VOCABULARY = 64


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up by a hidden stride, with noise; a model learns to continue them."""

    def __init__(self, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self.starts = torch.randint(VOCABULARY, (size,), generator=generator)
        self.strides = torch.randint(1, 8, (size,), generator=generator)
        hit = torch.rand(size, 24, generator=generator) < 0.2
        self.noise = hit * torch.randint(VOCABULARY, (size, 24), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.starts[index] + self.strides[index] * torch.arange(24)
        tokens = (tokens + self.noise[index]) % VOCABULARY
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Model(nn.Module):
    """A small recurrent language model whose output has ``.loss``, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.body = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss under the name under which the scope picks it up."""
        hidden, _ = self.body(self.embedding(input_ids))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/two-lines")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--forget-sampler", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Counting()
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(dataset, seed=0)
    forgotten = torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(
        dataset, batch_size=8, sampler=forgotten if options.forget_sampler else sampler
    )
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    scope = rankscope.watch(model, optimizer, run_dir=options.run_dir)  # <- one
    for step, batch in enumerate(loader):
        if step == options.steps:
            break
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scope.close()  # <- two

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
