"""Trainings under Ray Train on two workers, started once; what came of them is written as JSON.

Started by ``test_ray.py`` as a script, so that nothing of Ray stays in the process of the tests.
"""

import faulthandler
import json
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from unittest import mock

FOLDER = Path(sys.argv[1])
STEPS = 8
LAST_WORDS = "the end of the training function"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_V2_ENABLED": "1",
    # Without this every worker gives way to all other processes of the machine.
    "RAY_worker_niceness": "0",
    # Only the processes that a training needs ...
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_task_events_report_interval_ms": "0",
    # ... as long as they may take to start on a busy machine.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}


def train_all(config):
    """Run in each worker: by hand, unwatched, watched, and with ends that close nothing."""
    import ray.train

    import rankscope
    from documentation.framework_blocks import run_ray
    from integrations.adapters import OPTIONS
    from rankscope.integrations.ray import watch

    scope = train(lambda *watched: rankscope.watch(*watched, run_dir=FOLDER / "hand", **OPTIONS))
    scope.close()
    result = {"unwatched": train(None)}
    scope = train(lambda *watched: watch(*watched, run_dir=FOLDER / "healthy", **OPTIONS), result)
    scope.close()
    under_ray(lambda: train(lambda *w: watch(*w, run_dir=FOLDER / "returned", **OPTIONS)))
    result["page"] = run_ray(FOLDER, under_ray)
    result["storage"] = ray.train.get_context().get_storage().experiment_fs_path
    (FOLDER / f"{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(result))
    train(lambda *watched: watch(*watched, run_dir=FOLDER / "raised", **OPTIONS))
    if ray.train.get_context().get_world_rank() == 0:  # whoever is first ends all the others
        raise ArithmeticError(LAST_WORDS)


def under_ray(function):
    """Run a training function, and wait for its end, as a worker of Ray Train does."""
    from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner

    runner = ThreadRunner()
    with mock.patch("rankscope.integrations.ray._runner", return_value=runner):
        runner.run(function)
        while runner.is_running():
            time.sleep(0.01)
    assert runner.get_error() is None, runner.get_error()


def train(watch, result=None):
    import ray.train
    import ray.train.torch
    import torch

    from integrations.adapters import bits
    from support.models import make_batch, make_model

    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    import psutil
    import ray
    from ray._private.node import Node
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    # Neither grows the cluster nor carries a log to the driver, both of which no training needs.
    Node.start_monitor = Node.start_log_monitor = lambda _: None
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
    )
    trainer = TorchTrainer(
        train_all,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="all", storage_path=str(FOLDER / "storage")),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        if LAST_WORDS not in str(error):
            raise
    ray.shutdown()
    deadline = time.monotonic() + 10
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    (FOLDER / "left.json").write_text(json.dumps([process.name() for process in left]))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[2]))
    os.environ.update(ENVIRONMENT)
    main()
