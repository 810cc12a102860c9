"""Parts of ``make gpu``: what must stay as it is, bit by bit, and the study's large model."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_common import (
    NotPossibleError,
    Setup,
    Values,
    attempt,
    recorded,
    run_ranks,
    scratch,
)
from gpu_model import Llama, make_batch
from gpu_page import PARTS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.bundles import PlainBatch
from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch
from rankscope.evidence.canary.replay import run_batch

STEPS = 8


class _Noisy(nn.Module):
    """A model that draws random numbers and keeps running statistics, of 50 M parameters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width = setup.pick(2048, 12)
        self.first, self.second = (nn.Linear(width, 4 * width) for _ in range(2))
        self.norm, self.last = nn.BatchNorm1d(4 * width), nn.Linear(4 * width, width)
        self.hidden = width

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return a loss; inputs and labels are ``[batch, width]``."""
        gated = self.norm(self.first(inputs)) * torch.sigmoid(self.second(inputs))
        hidden = F.dropout(gated, 0.1, training=self.training)
        return {"loss": F.mse_loss(self.last(hidden), labels)}


def measure_bits(setup: Setup) -> Iterator[Values]:
    """Compare, bit by bit, before and after a canary, and watched with unwatched."""
    own = setup.pick("nccl", "gloo")
    *canaries, alone, shared = PARTS["bits"].rows
    yield attempt(canaries, partial(run_ranks, _canaries, 1, own, setup))
    for what, ranks, backend in ((alone, 1, own), (shared, 2, "gloo")):
        work = partial(run_ranks, _watched_and_not, ranks, backend, setup, what)
        yield attempt((what,), work)


# A canary --------------------------------------------------------------------------------------


def _canaries(setup: Setup) -> Values:
    device = setup.device
    model = _Noisy(setup).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, model.hidden, device=device)
    batch = {"inputs": inputs, "labels": inputs.roll(1, 0)}
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    plain = capture_batch((), batch).plain()
    first = run_batch(model, plain, device, seed=5).read()
    before = _State(setup, model, optimizer)
    second = run_batch(model, plain, device, seed=5).read()
    same, memory = before.compare()
    found: Values = {
        "canary: tensors with the same bits afterwards": same,
        "canary: random generators as they were": before.generators_are_equal(),
        "canary: memory that stays allocated": memory,
        "canary: the same bits from the same batch": first.digest == second.digest,
    }
    try:
        said = _without_memory(setup, model, plain)
    except NotPossibleError as reason:
        said = f"not possible here: {reason}"
    same, memory = before.compare()
    return found | {
        "canary without memory: what it says": said,
        "canary without memory: tensors with the same bits afterwards": same,
        "canary without memory: memory that stays allocated": memory,
    }


class _State:
    """What a canary must leave alone, as it was when this was made."""

    def __init__(self, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._setup, self._model, self._optimizer = setup, model, optimizer
        self._tensors = [tensor.detach().clone() for tensor in self._now()]
        self._generators = self._generators_now()
        self._memory = self._memory_now()

    def compare(self) -> tuple[str, int]:
        """Return how many tensors have the same bits, and bytes that are allocated beside."""
        memory = self._memory_now() - self._memory
        now = list(self._now())
        equal = [torch.equal(a, b) for a, b in zip(now, self._tensors, strict=True)]
        return f"{sum(equal)} of {len(equal)}", memory

    def generators_are_equal(self) -> bool:
        """Return whether no random generator has moved."""
        now = self._generators_now()
        return all(torch.equal(a, b) for a, b in zip(now, self._generators, strict=True))

    def _now(self) -> list[Tensor]:
        parameters = list(self._model.parameters())
        tensors = [*parameters, *self._model.buffers()]
        tensors += [p.grad for p in parameters if p.grad is not None]
        states = self._optimizer.state.values()
        return tensors + [v for state in states for v in state.values() if torch.is_tensor(v)]

    def _generators_now(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._setup.dry else [*states, torch.cuda.get_rng_state()]

    def _memory_now(self) -> int:
        self._setup.synchronise()
        return 0 if self._setup.dry else torch.cuda.memory_allocated()


def _without_memory(setup: Setup, model: nn.Module, plain: PlainBatch) -> str:
    """Run a canary when the allocator may take no more than it has; return what it answers."""
    if setup.dry:
        raise NotPossibleError("a dry run")
    total = torch.cuda.get_device_properties(setup.device).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
        run_batch(model, plain, setup.device, seed=5).read()
    except CanaryDeclined as reason:
        return f"declined: {str(reason).partition(' Tried')[0]}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return "ran all the same"


# Watched and not -------------------------------------------------------------------------------


def _watched_and_not(setup: Setup, what: str) -> Values:
    """Return how many parameters have the same bits after some steps with and without watching."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    seed = dist.get_rank()
    results = [_trained(setup, seed, watched=watched) for watched in (False, True)]
    equal = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return {what: f"{sum(equal)} of {len(equal)}"}


def _trained(setup: Setup, seed: int, *, watched: bool) -> list[Tensor]:
    torch.manual_seed(0)
    device = setup.device
    with device:
        inner = Llama(Setup(dry=True, seconds=0))
        for parameter in inner.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
    model = DistributedDataParallel(inner, device_ids=None if setup.dry else [device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = f"{folder}/run"
        scope = rankscope.watch(model, optimizer, run_dir=run_dir) if watched else None
        for _ in range(STEPS):
            with sdpa_kernel(SDPBackend.MATH):  # others' backward passes add in any order
                loss = model(**make_batch(setup, inner, 64))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.close()
        dist.barrier()
    return [parameter.detach().clone() for parameter in inner.parameters()]


# The study -------------------------------------------------------------------------------------


def measure_study(setup: Setup) -> Iterator[Values]:
    """Train the study's large model for a few steps, on two workers."""
    from rankscope.lab.study.config import Setting, ShardReading, StudyConfig
    from rankscope.lab.study.runner import run_study

    with scratch() as folder:
        config = StudyConfig(
            model=_tiny_model(Path(folder)) if setup.dry else "pangu-1b",
            workers=2,
            steps=setup.pick(6, 2),
            batch_size=1,
            limit=setup.pick(512, 16),
            max_length=setup.pick(256, 32),
            readings=(ShardReading.REPLICATED,),  # of which no model is saved
            settings=(Setting.S1_3,),
        )
        start = time.perf_counter()
        run_study(config, Path(folder) / "study")
        seconds = time.perf_counter() - start
        (combination,) = config.combinations
        run_dir = Path(folder) / "study" / "runs" / combination.name
        steps, own, cosine = recorded(run_dir, "step", "overhead_seconds", "cosine_mean")
        _, seconds_TW = rankscope.Run.open(run_dir).per_worker("step_seconds")
        study = json.loads((Path(folder) / "study" / "study.json").read_text())
    yield {
        "parameters": study["num_parameters"],
        "steps in the record of 2 workers": len(steps),
        "a step, watched": 1e3 * float(np.nanmedian(seconds_TW[1:])),
        "by the probe's own clock": 1e3 * float(np.nanmedian(own)),
        "cosine of the two workers' gradients": float(np.nanmedian(cosine)),
        "all of the study": seconds,
    }


def _tiny_model(folder: Path) -> str:
    """Write a model for a dry run; the study's own tiny one would be trained first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rankscope.lab.study.base import train_tokenizer
    from rankscope.lab.study.data import load_records

    tokenizer: Any = train_tokenizer(load_records("builtin", limit=64).held_out)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    path = folder / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
