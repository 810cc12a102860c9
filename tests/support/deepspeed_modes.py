"""Training loops under the ways of using DeepSpeed that must be watched, run on real ranks."""

import contextlib
import functools
import gc
import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models import TinyLM, make_batch, make_model
from support.releases import SINCE_TORCH_2_13

LOSS_SCALE = 64.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Mode:
    """One way of training.

    Its style is what ends a step: ``"engine"`` counts, ``"boundary"`` is set by the training,
    ``"unmanaged"`` ends with ``step``; ``"no_sync"`` and ``"coalesce"`` are the contexts of these
    names; in ``"torch"`` the loss's own ``backward`` is called.
    """

    name: str
    stage: int
    accumulate: int = 1
    dtype: str = "fp32"
    sums: str = ""  # in which gradients are accumulated; by default the parameters' own
    zero: dict[str, Any] = field(default_factory=dict)
    style: str = "engine"
    branch: str = ""  # "never": an unused branch; "rank 0": used by rank 0 only
    checkpoint: str = ""  # "reentrant" or "plain": layers that the backward pass recomputes
    compiled: bool = False
    in_parts: bool = False  # the accumulated gradient is never whole

    @property
    def loss_scale(self):
        return LOSS_SCALE if self.dtype == "fp16" else 1.0


_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_OFFLOAD_ALL = {**_OFFLOAD, "offload_param": {"device": "cpu"}}
MODES = [
    Mode("ZeRO 0 fp32 accumulate 1", 0),
    Mode("ZeRO 1 bf16 accumulate 2", 1, 2, "bf16"),
    Mode("ZeRO 2 fp32 accumulate 2", 2, 2, in_parts=True),
    Mode("ZeRO 3 bf16 accumulate 1", 3, dtype="bf16", in_parts=True),
    Mode("ZeRO 1 fp32 sums of bf16", 1, 2, "bf16", "fp32"),
    Mode("ZeRO 1 overlapped", 1, 2, zero={"overlap_comm": True}, in_parts=True),
    Mode("ZeRO 2 all-reduced", 2, 2, zero={"reduce_scatter": False}, in_parts=True),
    Mode("ZeRO 3 all sharded", 3, 2, zero={"stage3_param_persistence_threshold": 0}, in_parts=True),
    Mode("ZeRO 1 offloaded", 1, 2, zero=_OFFLOAD),
    Mode("ZeRO 3 offloaded", 3, 2, zero=_OFFLOAD_ALL, in_parts=True),
    Mode("ZeRO 1 fp16", 1, 2, "fp16"),
    Mode("ZeRO 2 boundary set", 2, 3, style="boundary", in_parts=True),
    Mode("ZeRO 0 unmanaged", 0, 2, style="unmanaged"),
    Mode("ZeRO 3 coalesced", 3, 2, style="coalesce", in_parts=True),
    Mode("ZeRO 0 no_sync", 0, 2, style="no_sync"),
    Mode("ZeRO 2 torch backward", 2, 2, style="torch", in_parts=True),
    Mode("ZeRO 0 used on one rank", 0, 2, branch="rank 0"),
    Mode("ZeRO 3 unused", 3, branch="never", in_parts=True),
    Mode("ZeRO 0 reentrant", 0, checkpoint="reentrant"),
    Mode("ZeRO 3 reentrant", 3, checkpoint="reentrant", in_parts=True),
    Mode("ZeRO 2 recomputed", 2, checkpoint="plain", in_parts=True),
]
if SINCE_TORCH_2_13:  # before, DeepSpeed's gradients are zero where another engine came first
    MODES.append(Mode("ZeRO 2 compiled", 2, 2, compiled=True, in_parts=True))


class CheckpointedLM(TinyLM):
    """Recomputes layers; one is used twice, unless DeepSpeed refuses to reduce a gradient twice."""

    def __init__(self, mode, *, dropout):
        super().__init__(dropout=dropout)
        self._reentrant = mode.checkpoint == "reentrant"
        first = nn.Linear(24, 24)
        refused = self._reentrant and mode.stage >= 2
        self.layers = nn.ModuleList([first, nn.Linear(24, 24) if refused else first])

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, self.dropout(hidden).tanh(), use_reentrant=self._reentrant)
        hidden = self.norm(self.hidden(hidden).flatten(0, 1)).relu()
        loss = F.cross_entropy(self.head(hidden), labels.flatten(), ignore_index=-100)
        return {"loss": loss}


def import_deepspeed(rank=0):
    """Import DeepSpeed without compilers, of which a killed rank leaves a lock behind."""
    os.environ["LOCAL_RANK"] = str(rank)
    return _import_deepspeed()


@functools.cache
def _import_deepspeed():
    os.environ["DS_ACCELERATOR"] = "cpu"
    with mock.patch.object(torch, "compile", lambda function=None, **options: function):
        import deepspeed
        import deepspeed.runtime.zero.muon.original_muon  # asks for a compiler
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    type(get_accelerator()).is_fp16_supported = lambda self: True  # torch has it, if slowly
    gc.freeze()  # DeepSpeed collects garbage whenever it makes an engine
    return deepspeed


def make_engine(rank, mode, *, dropout=0.1, model=None):
    deepspeed = import_deepspeed(rank)
    model = _make_model(mode, dropout) if model is None else model
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": mode.accumulate if _engine_divides(mode) else 1,
        "gradient_clipping": 0.05,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": mode.stage, "reduce_bucket_size": 1500, **mode.zero},
        "bf16": {"enabled": mode.dtype == "bf16"},
        "fp16": {"enabled": mode.dtype == "fp16", "loss_scale": LOSS_SCALE},
        "data_types": {"buffer_dtype": mode.dtype, "grad_accum_dtype": mode.sums or mode.dtype},
        "managed_gradient_accumulation": mode.style != "unmanaged",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if mode.compiled:
        engine.compile(backend="aot_eager")
    torch.manual_seed(100 + rank)
    return engine


def _make_model(mode, dropout):
    if mode.checkpoint:
        torch.manual_seed(0)
        return CheckpointedLM(mode, dropout=dropout)
    return make_model(dropout=dropout, branch=bool(mode.branch))


def _engine_divides(mode):
    return mode.style in ("engine", "torch", "unmanaged")


def _batch(rank, mode, step, micro):
    batch = make_batch(rank, mode.accumulate * step + micro)
    if mode.branch == "rank 0" and rank == 0:
        batch["use_branch"] = True
    return batch


def train_step(rank, mode, step, engine):
    context = engine.coalesce_grad_reduction if mode.style == "coalesce" else contextlib.nullcontext
    with context():
        for micro in range(mode.accumulate):
            run_micro_batch(rank, mode, step, micro, engine)
            if mode.style in ("engine", "torch"):
                engine.step()
    if mode.style not in ("engine", "torch"):
        engine.step()


def run_micro_batch(rank, mode, step, micro, engine):
    last = micro == mode.accumulate - 1
    if mode.style == "boundary":
        engine.set_gradient_accumulation_boundary(last)
    silent = mode.style == "no_sync" and not last
    with engine.no_sync() if silent else contextlib.nullcontext():
        loss = engine(**_batch(rank, mode, step, micro))["loss"]
        if not _engine_divides(mode):
            loss = loss / mode.accumulate
        if mode.style == "torch":
            loss.backward()
        else:
            engine.backward(loss)


def micro_gradients(rank, mode, step, engine):
    alone = _make_model(mode, 0.0).to(_DTYPES[mode.dtype])
    alone.load_state_dict(full_parameters(engine) | dict(engine.module.named_buffers()))
    alone.train(engine.module.training)
    gradients = []
    for micro in range(mode.accumulate):
        alone.zero_grad()
        loss = alone(**_batch(rank, mode, step, micro))["loss"]
        (loss / mode.accumulate * mode.loss_scale).backward()
        gradients.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in alone.named_parameters()
            }
        )
    return gradients


def accumulated(mode, micro):
    """Return the sum of micro-batches' gradients, rounded as this mode's training does."""
    dtype = torch.float64 if mode.in_parts else _DTYPES[mode.sums or mode.dtype]
    total = {name: gradient.to(dtype, copy=True) for name, gradient in micro[0].items()}
    for gradients in micro[1:]:
        for name, gradient in gradients.items():
            total[name] += gradient.to(dtype)
    return total


def full_parameters(engine):
    """Return copies of all parameters; collective in stage 3."""
    import deepspeed

    sharded = engine.zero_optimization_stage() == 3
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=sharded):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def state_of(engine):
    state = full_parameters(engine) | dict(engine.module.named_buffers())
    if engine.zero_optimization_stage() == 3:
        state |= _optimizer_state_of_stage_3(engine)
    else:
        for index, (master, values) in enumerate(engine.basic_optimizer.state.items()):
            state[f"master {index}"] = master.detach()
            state |= {f"{name} {index}": value for name, value in values.items()}
    state["rng"] = torch.get_rng_state()
    return {n: v.reshape(-1).view(torch.uint8).numpy().tobytes() for n, v in state.items()}


def _optimizer_state_of_stage_3(engine):
    """Gather what the optimizer holds, without the padding of shards, which is never written."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state = {}
    for name, parameter in engine.module.named_parameters():
        state[f"master {name}"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key} {name}"] = safe_get_full_optimizer_state(parameter, key)
    return state
