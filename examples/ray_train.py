"""A Ray Train job on two local workers, watched with one line, marked by an arrow.

    python examples/ray_train.py
    rankscope report runs/ray/healthy/rankscope

With a fault: a learning rate that depends on the worker.

    python examples/ray_train.py --scale-rate
    rankscope report runs/ray/fault/rankscope
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rankscope.integrations.ray import watch


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Train a small classifier; runs in each worker."""
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    dataset = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    model = ray.train.torch.prepare_model(module)
    rank = ray.train.get_context().get_world_rank()
    rate = 0.05 * (1 + rank) if config["scale_rate"] else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    scope = watch(model, optimizer)  # <- the one line
    for step, (batch, labels) in enumerate(loader):
        if step == config["steps"]:
            break
        loss: Any = F.cross_entropy(model(batch), labels)
        scope.loss(loss)  # the model's output has no .loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Start Ray on this machine, train, and shut it down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--scale-rate", action="store_true")
    parser.add_argument("--storage", default="runs/ray")
    options = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": options.steps, "scale_rate": options.scale_rate},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="fault" if options.scale_rate else "healthy",
            storage_path=str(Path(options.storage).resolve()),
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
