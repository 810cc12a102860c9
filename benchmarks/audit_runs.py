"""Real ranks for ``audit.py``: compressed reductions against the truth, and healthy jobs."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.groups import group_parameters
from rankscope.lab.study.config import Combination, Setting, ShardReading, StudyConfig
from rankscope.lab.study.data import load_records
from rankscope.lab.study.encoding import draw_batches, encode
from rankscope.lab.study.models import load_model

Row = dict[str, Any]
VOCABULARY, WIDTH, LENGTH, BATCH = 48, 32, 8, 2
FINDING = "numerics.reduction_error"


class Tiny(nn.Module):
    """A small language model with a scale of one element and a part that few steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.ParameterDict({"scale": nn.Parameter(torch.ones(()))})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, use_all: bool = True) -> Tensor:
        """Return the loss of the next tokens."""
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if use_all:
            hidden = hidden + self.seldom(hidden)
        logits = self.head(hidden * self.gain["scale"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


MODES = (
    "plain",
    "views",
    "bfloat16",
    "accumulation",
    "scaler",
    "tiny-gradients",
    "zero-gradients",
    "unused",
    "cancelling",
    "fsdp2",
    "fsdp2-bfloat16",
    "three-ranks",
)
"""Healthy jobs; all have a group of one element, whose gradients now and then cancel."""


def measure_healthy(steps: int, modes: list[str]) -> Iterator[Row]:
    """Train healthy jobs, those of one number of ranks in one process group."""
    for ranks in (2, 3):
        chosen = [mode for mode in modes if (ranks == 3) == (mode == "three-ranks")]
        if chosen:
            yield from run_ranks(train_all, ranks, chosen, steps)


def train_all(modes: list[str], steps: int) -> list[Row]:
    """Train jobs one after the other on one rank."""
    rows = []
    for mode in modes:
        rows.append(train_healthy(mode, steps))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    return rows


def train_healthy(mode: str, steps: int) -> Row:
    """Train one job on one rank."""
    torch.manual_seed(0)
    started = time.perf_counter()
    model = _wrap(Tiny(), mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: Row = {"reduced": "sketch", "overhead_budget": None, "evidence": False}
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        scope = rankscope.watch(model, optimizer, run_dir=Path(folder) / "run", **options)
        with scope:
            for step in range(steps):
                _train_step(model, optimizer, mode, step, generator, scope)
        found = [f for f in scope.findings if f.cause == FINDING]
        known = largest = 0.0
        groups = 0
        if dist.get_rank() == 0:
            for report in rankscope.Run.open(Path(folder) / "run").iter_reports():
                residuals_WG = report.gathered.residuals_WG
                if residuals_WG is not None:
                    known += 1
                    groups = residuals_WG.shape[1]
                    largest = max(largest, float(torch.from_numpy(residuals_WG).nan_to_num().max()))
    return {
        "mode": mode,
        "workers": dist.get_world_size(),
        "steps": steps,
        "audited": int(known),
        "groups": groups,
        "largest": largest,
        "seconds": round(time.perf_counter() - started),
        "found": [json.loads(json.dumps(f.to_json())) for f in found],
    }


def _wrap(model: nn.Module, mode: str) -> nn.Module:
    if mode == "bfloat16":
        model = model.bfloat16()
    if mode.startswith("fsdp2"):
        sixteen = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        policy = sixteen if mode.endswith("bfloat16") else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.gain["scale"] = nn.Parameter(torch.ones(1))  # type: ignore[index,operator]
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    return DistributedDataParallel(
        model, find_unused_parameters=mode == "unused", gradient_as_bucket_view=mode == "views"
    )


def _train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mode: str,
    step: int,
    generator: torch.Generator,
    scope: Any,
) -> None:
    micro = 3 if mode == "accumulation" else 1
    scale = {"scaler": 2.0**16, "tiny-gradients": 1e-30}.get(mode, 1.0)
    if mode == "scaler" and step % 400 == 399:
        scale = float("inf")  # the scaler tries its limits
    for part in range(micro):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        inner = model.no_sync() if part < micro - 1 else nullcontext()  # type: ignore[operator]
        with inner:
            use_all = mode != "unused" or (step + dist.get_rank()) % 3 == 0
            loss = model(ids, use_all)
            if mode == "cancelling":
                loss = loss * (1.0 if dist.get_rank() == 0 else -1.0)
            if mode == "zero-gradients" and step % 2:
                loss = loss * 0.0
            (loss * scale / micro).backward()
    if scale != float("inf"):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
    optimizer.zero_grad()


def measure_real() -> Iterator[Row]:
    """Compare residuals with the truth where DDP casts gradients before it reduces them."""
    for dtype in ("bfloat16", "float16"):
        for ranks in (2, 4, 8):
            yield from run_ranks(train_compressed, ranks, dtype, 3)


def _compress(dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """Return DDP's own way of casting gradients; it refuses bfloat16 where there is no GPU."""

    def hook(
        state: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        small = buffer.to(dtype).div_(dist.get_world_size())
        future: Any = dist.all_reduce(small, async_op=True).get_future()

        def widen(done: Any) -> Tensor:
            buffer.copy_(done.value()[0])
            return buffer

        result: torch.futures.Future[Tensor] = future.then(widen)
        return result

    return hook


def train_compressed(dtype: str, steps: int) -> list[Row]:
    """Fine-tune the built-in model on one rank; the truth comes from a second backward pass."""
    torch.manual_seed(0)
    module, batches = _study()
    names = [name for name, _ in module.named_parameters()]
    parameters: list[Tensor] = list(module.parameters())
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, _compress(getattr(torch, dtype)))
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    true: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        options: Row = {"reduced": "sketch", "overhead_budget": None, "evidence": False}
        with rankscope.watch(model, optimizer, run_dir=Path(folder) / "run", **options):
            for _, inputs in zip(range(steps), batches, strict=False):
                local = torch.autograd.grad(module(**inputs).loss, parameters)
                model(**inputs).loss.backward()
                true.append(_errors(names, local, parameters))
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank():
            return []
        reports = list(rankscope.Run.open(Path(folder) / "run").iter_reports())
    groups = group_parameters(names)
    rows = []
    for report, errors in zip(reports, true, strict=True):
        gathered = report.gathered
        assert gathered.residuals_WG is not None, "the reduction is audited"
        for g, group in enumerate(gathered.groups):
            members = [v for name, v in errors.items() if groups.index_of[name] == g]
            squares = torch.tensor(members).sum(0)
            error = float((squares[0] / squares[1]).sqrt())
            residual = float(gathered.residuals_WG[:, g].max())
            rows.append(
                {
                    "workers": dist.get_world_size(),
                    "dtype": dtype,
                    "order": "DDP over gloo",
                    "group": group,
                    "true": error,
                    "residual": residual,
                    "ratio": residual / error,
                }
            )
    return rows


def _study() -> tuple[nn.Module, Iterator[Row]]:
    """Return the built-in model of ``rankscope study`` and this rank's batches."""
    config = StudyConfig(seed=0)
    records = load_records(None, seed=0)
    loaded = load_model("tiny", seed=0, tokenizer_records=records.held_out, base_steps=60)
    samples = encode(records.records, loaded.tokenizer, config.max_length)
    batches = draw_batches(
        Combination(ShardReading.SHARDED, Setting.S1_1),
        num_samples=len(samples),
        batch_size=config.batch_size,
        rank=dist.get_rank(),
        num_workers=dist.get_world_size(),
        seed=0,
    )
    return loaded.model, (samples.collate(batch)[0] for batch in batches)


def _errors(
    names: list[str], local: tuple[Tensor, ...], parameters: list[Tensor]
) -> dict[str, list[float]]:
    """Return squared distance from the mean, and squared norm of the mean, of each parameter."""
    errors = {}
    for name, own, parameter in zip(names, local, parameters, strict=True):
        mean = own.double()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        assert parameter.grad is not None
        distance = parameter.grad.double() - mean
        errors[name] = [float(distance.square().sum()), float(mean.square().sum())]
    return errors
