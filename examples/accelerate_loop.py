"""A loop with Accelerate and two lines for rankscope, marked by arrows.

Healthy, on 2 workers:

    torchrun --nproc-per-node 2 examples/accelerate_loop.py
    rankscope report runs/accelerate

With a data loader that never went through ``prepare``, so that all workers draw the same batches:

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --unprepared --run-dir runs/twins
    rankscope report runs/twins
"""

import argparse

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from rankscope.integrations.accelerate import watch

VOCABULARY = 64


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up by a hidden stride, with noise."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(VOCABULARY, (), generator=generator)
        stride = torch.randint(1, 8, (), generator=generator)
        noise = torch.randint(VOCABULARY, (24,), generator=generator)
        noisy = torch.rand(24, generator=generator) < 0.2
        tokens = (start + stride * torch.arange(24) + noisy * noise) % VOCABULARY
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
        logits = self.head(self.body(self.embedding(input_ids))[0])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/accelerate")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--unprepared", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Counting(), batch_size=8, shuffle=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not options.unprepared:
        loader = accelerator.prepare(loader)

    watch(accelerator, model, optimizer, loader=loader, run_dir=options.run_dir)  # <- one
    for number, batch in enumerate(loader):
        if number == 2 * options.steps:
            break
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()  # <- two: finishes the run as well


if __name__ == "__main__":
    main()
