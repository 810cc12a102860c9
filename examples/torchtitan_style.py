"""A training loop of torchtitan's shape under FSDP2, watched with one line, marked by an arrow.

It shows the shape that ``rankscope.integrations.torchtitan`` expects, with a tiny model and made-up
data on the CPU. torchtitan itself is not needed, and not used.

    torchrun --nproc-per-node 2 examples/torchtitan_style.py
    rankscope report runs/torchtitan

With a fault that no loss curve shows, a data loader that is told the same rank on all workers:

    torchrun --nproc-per-node 2 examples/torchtitan_style.py --same-shard --run-dir runs/fault
    rankscope report runs/fault
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from rankscope.integrations.torchtitan import watch

VOCABULARY, IGNORED = 64, -100
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class ParallelDims:
    """How many workers replicate the model, and over how many each replica is sharded."""

    dp_replicate: int
    dp_shard: int


@dataclass(frozen=True)
class Config:
    """What a training is made of."""

    dims: ParallelDims
    steps: int = 60
    gradient_accumulation_steps: int = 2
    same_shard: bool = False
    split_optimizer: bool = False


class Block(nn.Module):
    """Mixes each place with the two before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, T, width]``."""
        before = [F.pad(hidden, (0, 0, back, 0))[:, : hidden.shape[1]] for back in range(3)]
        mixed: Tensor = hidden + self.mix(torch.cat(before, -1)).tanh()
        return mixed


class Decoder(nn.Module):
    """Predicts the next token of each sequence from the last few."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B·T, V]`` of the token that follows each of ``[B, T]``."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.output(hidden.flatten(0, 1))
        return logits


class DataLoader:
    """Endless noisy batches of sequences that count up, of different lengths, by rank."""

    def __init__(self, dp_rank: int) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._draw(size=4, length=16)

    def _draw(self, size: int, length: int) -> Batch:
        def integers(low: int, high: int, columns: int = 1) -> Tensor:
            return torch.randint(low, high, (size, columns), generator=self._generator)

        places = torch.arange(length + 1)
        noise = (integers(0, 5, length + 1) == 0) * integers(0, VOCABULARY, length + 1)
        tokens = (integers(0, VOCABULARY) + integers(1, 8) * places + noise) % VOCABULARY
        labels = tokens[:, 1:].clone()
        labels[places[1:] > integers(length // 2, length)] = IGNORED
        return {"input": tokens[:, :-1]}, labels


class OptimizersContainer:
    """Several optimizers that step together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        """Let each of them update its parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class MetricsProcessor:
    """Prints what the averaged loss is, all that such loops usually show."""

    def log(self, step: int, global_avg_loss: float) -> None:
        """Print a line on rank 0."""
        if dist.get_rank() == 0:
            print(f"step {step:3d}  loss {global_avg_loss:.4f}")


def cross_entropy_sum(pred: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all label tokens."""
    return F.cross_entropy(pred, labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Trainer:
    """A training, from the model to its end.

    Args:
        config: What it is made of.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parallel_dims = dims = config.dims
        self.gradient_accumulation_steps = config.gradient_accumulation_steps
        torch.manual_seed(0)
        model = Decoder()
        shape, names = (dims.dp_replicate, dims.dp_shard), ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        sharding = mesh if dims.dp_replicate > 1 else mesh["dp_shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=sharding)
        fully_shard(model, mesh=sharding)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens instead
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        self.model_parts: list[nn.Module] = [model]
        self.optimizers = OptimizersContainer(self._make_optimizers(model))
        self.dataloader = DataLoader(0 if config.same_shard else dist.get_rank())
        self.loss_fn: Any = cross_entropy_sum
        self.metrics_processor = MetricsProcessor()
        self.step = 0

    def _make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = model.parameters()
        if not self.config.split_optimizer:
            return [torch.optim.AdamW([first, *others], lr=3e-3)]
        return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others, lr=3e-3)]

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Run one micro-batch; returns its loss over the tokens of all of them."""
        pred = self.model_parts[0](input_dict["input"])
        loss: Any = self.loss_fn(pred, labels) / global_valid_tokens
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Run one step."""
        self.optimizers.zero_grad()
        micro = [next(batches) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.stack([(labels != IGNORED).sum() for _, labels in micro]).sum()
        dist.all_reduce(tokens)
        [model] = self.model_parts
        assert isinstance(model, FSDPModule)
        losses = []
        for number, (input_dict, labels) in enumerate(micro, start=1):
            model.set_requires_gradient_sync(number == len(micro))
            losses.append(
                self.forward_backward_step(
                    input_dict=input_dict, labels=labels, global_valid_tokens=tokens
                )
            )
        self.optimizers.step()
        loss = torch.stack(losses).sum()
        dist.all_reduce(loss)
        if self.step % 10 == 0:
            self.metrics_processor.log(self.step, loss.item())

    def train(self) -> None:
        """Run all steps."""
        batches = iter(self.dataloader)
        while self.step < self.config.steps:
            self.step += 1
            self.train_step(batches)

    def close(self) -> None:
        """End the training; a real trainer finishes its checkpoints and logs here."""


def main() -> None:
    """Train a little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/torchtitan")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--same-shard", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    dims = ParallelDims(dp_replicate=1, dp_shard=dist.get_world_size())
    trainer = Trainer(Config(dims, steps=options.steps, same_shard=options.same_shard))
    watch(trainer, run_dir=options.run_dir)  # <- the one line
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
