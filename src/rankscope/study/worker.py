"""A worker of a study: joins the process group and runs every combination in turn."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from rankscope.errors import RankscopeError
from rankscope.study.config import Combination, StudyConfig
from rankscope.study.launch import heed_signals, ignore_signals, is_echo
from rankscope.study.prepare import Prepared, load, load_samples
from rankscope.study.progress import StudyProgress
from rankscope.study.training import Job, train

_ECHO_SECONDS = 1.0
"""How long a worker that lost another one waits, so that the launcher notices that one first."""


def main(
    config: StudyConfig, output: Path, prepared: Prepared, todo: Sequence[Combination]
) -> None:
    """Entry point of a process that the launcher started; one of our errors ends it quietly."""
    try:
        heed_signals()
        record(_main)(config, output, prepared, todo)
    except (RankscopeError, KeyboardInterrupt):
        sys.exit(1)
    finally:
        ignore_signals()


def _main(
    config: StudyConfig, output: Path, prepared: Prepared, todo: Sequence[Combination]
) -> None:
    device = join_process_group()
    try:
        run_combinations(config, output, prepared, todo, device)
    except Exception as error:
        if is_echo(str(error)):
            time.sleep(_ECHO_SECONDS)
        raise
    finally:
        dist.destroy_process_group()


def run_combinations(
    config: StudyConfig,
    output: Path,
    prepared: Prepared,
    todo: Sequence[Combination],
    device: torch.device,
) -> None:
    """Train under each combination in turn; every worker calls it."""
    job = Job(
        config=config,
        output=output,
        samples=load_samples(prepared),
        load=partial(load, config, prepared.held_out, torch.device("cpu")),
        device=device,
        facts=prepared.facts,
    )
    with StudyProgress(config, enabled=dist.get_rank() == 0) as progress:
        progress.say_left_out(prepared.facts)
        for combination in todo:
            with _warnings_held_back(progress.say):
                train(job, combination, progress.start(combination))


@contextmanager
def _warnings_held_back(say: Callable[[str], None]) -> Iterator[None]:
    """Say the monitor's warnings when a training has ended, and nothing when it has failed.

    The monitor notices as well that a worker has died; one line about that is enough.
    """
    log, held = logging.getLogger("rankscope"), BufferingHandler(capacity=1000)
    propagated, log.propagate = log.propagate, False
    log.addHandler(held)
    try:
        yield
        for warning in held.buffer:
            say(warning.getMessage())
    finally:
        log.removeHandler(held)
        log.propagate = propagated


def join_process_group() -> torch.device:
    """Join the launcher's process group and return this worker's device.

    One worker per accelerator uses the accelerator's own backend. More workers than accelerators
    share them over gloo.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    local_workers = int(os.environ["LOCAL_WORLD_SIZE"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % devices)
    torch.accelerator.set_device_index(device.index)
    own = dist.get_default_backend_for_device(device)
    dist.init_process_group(own if local_workers <= devices else "gloo")
    return device
