"""A plain training loop on one rank, with the warnings that the monitor logs beside it."""

import contextlib
import copy
import logging
import random
import time

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rankscope
from support.models import make_batch, make_model

PLAN = {"local_buffers": True, "loss_weighting": "worker"}
"""The model normalises batches by itself, and each worker's mean loss counts alike."""


def collect_warnings():
    """Return a list that gets the monitor's warnings, but no findings; tracebacks are marked."""
    warnings = []

    def collect(record):
        line = record.getMessage()
        if not line.startswith("rankscope: "):
            warnings.append(line + (" [traceback]" if record.exc_info else ""))

    handler = logging.Handler(logging.WARNING)
    handler.emit = collect
    logger = logging.getLogger("rankscope")
    logger.handlers, logger.propagate = [handler], False
    return warnings


def collect_lines():
    """Return a list that gets every line of the monitor in this process, notes too."""
    lines = []
    handler, logger = logging.Handler(), logging.getLogger("rankscope")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def root_of(loop):
    """Return what judges the steps of a loop, which lives in a thread of rank 0."""
    agent = loop.scope._handle.agent.agent
    while agent.root is None:
        time.sleep(0.01)
    return agent.root


def wait_for(scope, step):
    """Let the monitor of a scope, if there is one, judge a step; none before the first."""
    deadline = time.monotonic() + 60
    while scope is not None and step >= 0 and (scope.latest is None or scope.latest.step < step):
        assert time.monotonic() < deadline, f"step {step} was not judged within a minute"
        time.sleep(0.0005)


def train_watched(
    model, optimizer, run_dir, num_steps, loss_of, before_update=lambda step: None, **options
):
    with watch(model, optimizer, run_dir=run_dir, **{"canary": False, **options}):
        for step in range(num_steps):
            loss_of(step).backward()
            before_update(step)
            optimizer.step()
            optimizer.zero_grad()


def watch(model, optimizer=None, *, run_dir, **options):
    """Watch gradients in every step, and leave findings to the record; without one, do nothing."""
    if run_dir is None:
        return contextlib.nullcontext()
    options = {"run_dir": run_dir, "overhead_budget": None, "announce": False, **options}
    return rankscope.watch(model, optimizer, **options)


def bits_of(model, optimizers=()):
    """Return every bit of a training's state on this rank."""
    tensors = {**model.state_dict(), "rng": torch.get_rng_state()}
    for number, state in enumerate(s for one in optimizers for s in one.state.values()):
        tensors |= {f"{number} {n}": v for n, v in state.items() if isinstance(v, torch.Tensor)}
    local = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in tensors.items()}
    return {
        **{n: v.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, v in local.items()},
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tobytes(),  # noqa: NPY002
        "python": random.getstate(),
    }


def grad_norm(model):
    parts = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts).norm().item()


class Loop:
    """A small training on one rank, watched from its first step on if ``run_dir`` is given."""

    def __init__(self, rank, run_dir, **options):
        self.rank = rank
        self.warnings = collect_warnings()
        self.model = make_model(branch=options.pop("branch", False))
        self.ddp = DistributedDataParallel(self.model, **options.pop("ddp", {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(100 + rank)
        self.scope = None
        if run_dir is not None:
            self.watch(run_dir, **options)

    def watch(self, run_dir, **options):
        self.scope = watch(self.ddp, self.optimizer, run_dir=run_dir, **{"plan": PLAN, **options})

    def close(self):
        if self.scope is not None:
            self.scope.close(timeout=60.0)  # an agent may wait long for a busy processor

    def step(self, step, *, optimize=True, rank=None):
        self.forward(step, rank=rank).backward()
        self.update(optimize=optimize)

    def update(self, *, optimize=True):
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps, **how):
        """Train to the end; return the monitor's warnings."""
        for step in range(num_steps):
            self.step(step, **how)
        self.close()
        return self.warnings

    def forward(self, step, *, rank=None):
        batch = make_batch(self.rank if rank is None else rank, step)
        return self.ddp(**batch)["loss"]

    def exact_norm(self, *batches, branch=()):
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        with torch.random.fork_rng(devices=[]):
            for index, number in enumerate(batches):
                options = {"use_branch": True} if branch and branch[index] else {}
                loss = alone(**make_batch(self.rank, number), **options)["loss"]
                (loss / len(batches)).backward()
        return grad_norm(alone)

    def bits(self):
        return bits_of(self.model, [self.optimizer])
