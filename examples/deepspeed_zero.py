"""A DeepSpeed training under ZeRO 2 on the CPU, watched with one line, marked by an arrow.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero.py
    rankscope report runs/deepspeed

With a fault: another learning rate on one worker.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero.py --scale-rate \
        --run-dir runs/deepspeed-fault
    rankscope report runs/deepspeed-fault
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.integrations.deepspeed import watch

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Classifier(nn.Module):
    """Tells the sign of a sum; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over a batch."""
        return F.cross_entropy(self.layers(inputs), labels)


def main() -> None:
    """Train a little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/deepspeed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--scale-rate", action="store_true")
    options = parser.parse_args()

    # Nothing is compiled then: a rank that is killed while DeepSpeed compiles for the CPU leaves a
    # lock behind, which hangs the next start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Classifier()
    rate = 0.05 * (1 + rank) if options.scale_rate else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    scope = watch(engine, run_dir=options.run_dir)  # <- the one line
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2 * options.steps):  # two micro-batches a step
        inputs = torch.randn(8, 16, generator=generator)
        loss = engine(inputs, labels=(inputs[:, :4].sum(1) > 0).long())
        engine.backward(loss)
        engine.step()
    scope.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
