"""Trainings under Ray Train on two workers, started once; prints what came of them as JSON.

Started by ``test_ray.py`` as a script, so that nothing of Ray stays in the process of the tests.
"""

import contextlib
import json
import os
import sys
import time
from hashlib import sha256
from pathlib import Path

FOLDER = Path(sys.argv[1])
STEPS = 8


def train_all(config):
    """Run in each worker: by hand, watched, unwatched, and with a fault that closes nothing."""
    import ray.train

    import rankscope
    from integrations.adapter_runs import OPTIONS
    from rankscope.integrations.ray import watch

    scope = train(lambda *watched: rankscope.watch(*watched, run_dir=FOLDER / "hand", **OPTIONS))
    scope.close()
    result = {"unwatched": train(None)}
    scope = train(lambda *watched: watch(*watched, run_dir=FOLDER / "healthy", **OPTIONS), result)
    scope.close()
    train(lambda *watched: watch(*watched, **OPTIONS), fault=True)
    result["storage"] = ray.train.get_context().get_storage().experiment_fs_path
    (FOLDER / f"{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(result))


def train_and_raise(config):
    """Run in each worker: a training that ends in an exception."""
    from integrations.adapter_runs import OPTIONS
    from rankscope.integrations.ray import watch

    train(lambda *watched: watch(*watched, **OPTIONS))
    raise ArithmeticError("the end of the training function")


def train(watch, result=None, *, fault=False):
    """Train a little; return the scope, or the bits of the model where nothing watches."""
    import ray.train
    import ray.train.torch
    import torch

    from integrations.adapter_runs import bits
    from support.models import make_batch, make_model

    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(make_model())
    rate = 0.2 if fault and rank == 1 else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(100 + rank)
    scope = None if watch is None else watch(model, optimizer)
    for step in range(STEPS):
        model(**make_batch(rank, step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {**bits(model.module), "rng": torch.get_rng_state().numpy().tobytes()}
    digest = sha256(repr(sorted(state.items())).encode()).hexdigest()
    if result is not None:
        result["watched"] = digest
    return digest if scope is None else scope


def main():
    """Start Ray, train twice, and shut it down."""
    import psutil
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for name, function in (("all", train_all), ("raising", train_and_raise)):
        trainer = TorchTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=str(FOLDER / "storage")),
        )
        with contextlib.suppress(Exception) if name == "raising" else contextlib.nullcontext():
            trainer.fit()
    ray.shutdown()
    deadline = time.monotonic() + 10
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    (FOLDER / "left.json").write_text(json.dumps([process.name() for process in left]))


if __name__ == "__main__":
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    main()
