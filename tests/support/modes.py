"""Training loops under the ways of using DDP that must be watched, run on real ranks."""

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from support.checkpointed import CheckpointedLM, wrapped_in_checkpoints
from support.comm_hooks import register_comm_hook
from support.loops import bits_of, grad_norm, watch
from support.models import make_batch, make_model
from support.recorded import Truth


@dataclass(frozen=True)
class Mode:
    name: str
    ddp: dict[str, Any]
    accumulate: int = 1
    branch: str = ""  # "never": an unused branch; "rank 0": used by rank 0 only
    zero_in_place: bool = False
    divide: bool = True  # the loss by the number of micro-batches
    checkpoint: str = ""  # which checkpoints, or "wrapper"
    hook: str = ""  # a communication hook
    hook_after_watch: bool = False
    scaler: bool = False  # autocast, a gradient scaler, and an infinity on rank 1 in step 1
    clip: bool = False
    replicates: bool = False  # by ``replicate``, in the place of DDP


MODES = [
    Mode("plain", {}),
    Mode("bucket views", {"gradient_as_bucket_view": True}),
    Mode("bucket views zeroed in place", {"gradient_as_bucket_view": True}, zero_in_place=True),
    Mode("small buckets", {"bucket_cap_mb": 0.001}),
    Mode("no_sync", {}, accumulate=3),
    Mode("no_sync with bucket views", {"gradient_as_bucket_view": True}, accumulate=3),
    Mode("static graph", {"static_graph": True}),
    Mode("unused parameters", {"find_unused_parameters": True}, branch="never"),
    Mode("used on one rank", {"find_unused_parameters": True}, branch="rank 0"),
]

MORE_MODES = [
    Mode("replicate", {}, replicates=True),
    Mode("summed micro-batches", {}, accumulate=3, divide=False),
    Mode("shared reentrant checkpoints", {"static_graph": True}, checkpoint="shared reentrant"),
    Mode("checkpoint wrappers", {}, checkpoint="wrapper"),
    Mode("one reentrant checkpoint", {}, checkpoint="everything reentrant"),
    Mode("rounding hook", {}, hook="rounding"),
    Mode("PowerSGD after watch", {}, hook="PowerSGD", hook_after_watch=True, accumulate=2),
    Mode("scaler, micro-batches, clipping", {}, scaler=True, clip=True, accumulate=2),
]

POISONED_STEP = 1


class Training:
    """One rank's training in one mode; the same bits every time."""

    def __init__(self, rank, mode, run_dir=None, **options):
        self.rank, self.mode = rank, mode
        self.model = make_mode_model(mode)
        wrap = replicate if mode.replicates else DistributedDataParallel
        self.ddp = wrap(self.model, **mode.ddp)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=2, enabled=mode.scaler
        )
        if not mode.hook_after_watch:
            register_comm_hook(self.ddp, mode.hook)
        self.scope = None
        if run_dir is not None:
            self.watch(run_dir, **options)
        if mode.hook_after_watch:
            register_comm_hook(self.ddp, mode.hook)
        torch.manual_seed(100 + rank)

    def watch(self, run_dir, **options):
        self.scope = watch(self.ddp, self.optimizer, run_dir=run_dir, **options)

    def close(self):
        if self.scope is not None:
            self.scope.close()

    def step(self, step):
        """Train for one step; return the norm of the reduced gradient of the unscaled loss."""
        batches = micro_batches(self.rank, step, self.mode)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = self._forward(self.ddp, batch)
                with self._poison(step):
                    self.scaler.scale(loss / self._divisor).backward()
        norm = grad_norm(self.model) / self.multiplier
        self._optimize()
        return norm

    def oracle(self, step):
        """Return what is true of the step that comes next, computed without DDP or monitor."""
        return _compute(self.rank, self.mode, step, self.model, self._forward)

    def state(self):
        return bits_of(self.model, [self.optimizer]), self.scaler.get_scale()

    @property
    def multiplier(self):
        """What the sum of the micro-batches' gradients is multiplied by now, to be their mean."""
        return self.scaler.get_scale() * self.mode.accumulate / self._divisor

    @property
    def _divisor(self):
        return self.mode.accumulate if self.mode.divide else 1

    def _forward(self, model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mode.scaler):
            return model(**batch)["loss"]

    def _optimize(self):
        self.scaler.unscale_(self.optimizer)
        if self.mode.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.mode.zero_in_place)

    @contextlib.contextmanager
    def _poison(self, step):
        """Let a gradient overflow on one rank, as half precision now and then does."""
        if not (self.mode.scaler and step == POISONED_STEP and self.rank == 1):
            yield
            return
        bias = self.model.get_parameter("head.bias")
        handle = bias.register_hook(lambda gradient: gradient * float("inf"))
        yield
        handle.remove()


def make_mode_model(mode):
    if not mode.checkpoint:
        return make_model(branch=bool(mode.branch))
    model = CheckpointedLM(mode.checkpoint)
    return wrapped_in_checkpoints(model) if mode.checkpoint == "wrapper" else model


def micro_batches(rank, step, mode):
    batches = []
    for micro in range(mode.accumulate):
        batch = make_batch(rank, mode.accumulate * step + micro)
        if mode.branch == "rank 0" and rank == 0:
            batch["use_branch"] = True
        batches.append(batch)
    return batches


def train_step(rank, mode, step, ddp, optimizer):
    batches = micro_batches(rank, step, mode)
    for micro, batch in enumerate(batches):
        last = micro == len(batches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (ddp(**batch)["loss"] / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not mode.zero_in_place)


def _compute(rank, mode, step, model, forward):
    """Use the random numbers that the training is about to draw, and put the generator back."""
    with torch.random.fork_rng(devices=[]):
        alone = make_mode_model(mode)
    alone.load_state_dict(model.state_dict())
    if isinstance(alone, CheckpointedLM):
        alone.kind = ""
    losses, tokens, gradients = [], [], []
    with torch.random.fork_rng(devices=[]):
        for batch in micro_batches(rank, step, mode):
            loss = forward(alone, batch)
            loss.backward()
            losses.append(loss.item())
            tokens.append(int((batch["labels"] != -100).sum()))
            gradients.append(_gradient_by_name(alone))
            alone.zero_grad()
    mean = {name: np.mean([g[name] for g in gradients], axis=0) for name in gradients[0]}
    norms = [float(np.linalg.norm(np.concatenate(list(g.values())))) for g in gradients]
    return Truth(mean, norms, float(np.mean(losses)), sum(tokens))


def _gradient_by_name(model):
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            torch.zeros_like(p) if p.grad is None else p.grad
        )
        .double()
        .flatten()
        .numpy()
        for name, p in model.named_parameters()
    }
