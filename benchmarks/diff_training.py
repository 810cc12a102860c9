"""A small language model, really trained on real ranks, in many variants that differ in one thing.

What the pairs of runs in ``diff_pairs.py`` are made of; the tests of ``rankscope diff`` train a few
of them, too.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope

VOCABULARY, LENGTH, WIDTH, SAMPLES = 96, 12, 32, 512
GLOBAL_BATCH = 16


@dataclass(frozen=True)
class Flip:
    """One bit of one float32 element, flipped once.

    Attributes:
        step: In this step.
        bit: 0 is the last of the mantissa, 22 its first, 23 to 30 the exponent.
        where: ``parameter`` (right after the optimizer's step), ``forward`` (a parameter, when the
            forward pass begins), or ``reduced`` (right after the reduction).
        ranks: On these ranks; None: on all.
        seed: Chooses tensor and element.
    """

    step: int
    bit: int
    where: str = "parameter"
    ranks: tuple[int, ...] | None = (0,)
    seed: int = 0


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        name: Of its directory.
        seed: Of initialisation, data and dropout, unless said otherwise.
        init_seed: Of the initialisation.
        dropout_seed: Of the random generators during training.
        order_seed: Of the order of the samples.
        order_from: First step that uses ``order_seed``.
        steps: How many steps are trained.
        dropout: Its rate.
        lr: Learning rate.
        lr_from: First step that uses it; before, it is 1e-3.
        bucket_mb: Size of DDP's buckets.
        reduction: ``plain`` or ``gathered`` (summed by hand in the order of ``order``).
        order: The order in which ``gathered`` adds up the workers.
        compress: Whether gradients travel in bfloat16.
        dtype: Type of the parameters.
        autocast: Whether the forward pass computes in bfloat16.
        deal: From this step on, ``deal_to`` says which worker's batch each worker trains on.
        deal_to: See there.
        flip: A bit to flip.
        stop: Save a checkpoint after so many steps, and stop.
        resume: Begin from that checkpoint of this name.
        restore_random: Whether the random generators are restored then.
        restore_optimizer: Whether the optimizer is.
    """

    name: str
    seed: int = 0
    init_seed: int | None = None
    dropout_seed: int | None = None
    order_seed: int | None = None
    order_from: int = 0
    steps: int = 12
    dropout: float = 0.1
    lr: float = 1e-3
    lr_from: int = 0
    bucket_mb: float = 25.0
    reduction: str = "plain"
    order: tuple[int, ...] = ()
    compress: bool = False
    dtype: str = "float32"
    autocast: bool = False
    deal: int = 0
    deal_to: tuple[int, ...] = ()
    flip: Flip | None = None
    stop: int | None = None
    resume: str = ""
    restore_random: bool = True
    restore_optimizer: bool = True

    def but(self, name: str, **changes: Any) -> "Variant":
        """Return this run with other settings and another name."""
        return replace(self, name=name, **changes)


class Model(nn.Module):
    """Two transformer blocks with causal attention, an embedding and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss over all tokens."""
        hidden = self.embedding(input_ids) + self.position
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        logits = self.head(hidden).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def train_variants(rank: int, root: str, variants: list[Variant], trace: bool = True) -> None:
    """Train all variants one after the other, each recorded in ``root``/name."""
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    for variant in variants:
        _train(rank, Path(root), variant, trace=trace)
        dist.barrier()


def _train(rank: int, root: Path, variant: Variant, *, trace: bool) -> None:
    width = dist.get_world_size()
    torch.manual_seed(variant.seed if variant.init_seed is None else variant.init_seed)
    model = Model(variant.dropout).to(getattr(torch, variant.dtype))
    ddp = DistributedDataParallel(model, bucket_cap_mb=variant.bucket_mb)
    hook = Reduction(variant, rank)
    model.embedding.register_forward_pre_hook(  # runs after all that watches the model
        lambda *_: _flip_parameter(model, variant.flip, hook.step, rank, "forward")
    )
    ddp.register_comm_hook(None, hook.reduce_in_bf16 if variant.compress else hook.reduce)
    lr = 1e-3 if variant.lr_from else variant.lr
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=lr)
    random = variant.seed if variant.dropout_seed is None else variant.dropout_seed
    torch.manual_seed(1000 + 100 * random + rank)
    first = _restore(root, variant, rank, model, optimizer)
    scope = rankscope.watch(
        ddp,
        optimizer,
        run_dir=root / (variant.resume or variant.name),
        overhead_budget=None,
        hang_seconds=None,
        canary=False,
        trace=trace,
    )
    table = _table(variant.seed)
    last = variant.steps if variant.stop is None else variant.stop
    truth: dict[int, dict[str, str]] = {}
    with scope:
        for step in range(first, last):
            hook.step = step
            for group in optimizer.param_groups:
                group["lr"] = variant.lr if step >= variant.lr_from else 1e-3
            ids = table[_samples(variant, step, rank, width)]
            bits = {"data": _bits(ids), "random": _bits(torch.get_rng_state())}
            with _autocast(variant):
                loss = ddp(ids[:, :-1], ids[:, 1:])["loss"]
            loss.backward()
            for name, parameter in model.named_parameters():
                bits[f"reduced {name}"] = _bits(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            _flip_parameter(model, variant.flip, step, rank, "parameter")
            for name, parameter in model.named_parameters():
                bits[f"parameter {name}"] = _bits(parameter)
            bits["lr"] = str(optimizer.param_groups[0]["lr"])
            truth[step] = bits
    (root / f"{variant.name}-truth-{rank}.json").write_text(json.dumps(truth))
    if variant.stop is not None:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "step": last,
            },
            root / f"{variant.name}-{rank}.pt",
        )


def _bits(tensor: Tensor | None) -> str:
    """Return a digest of all bits of a tensor, in a way that owes nothing to rankscope."""
    if tensor is None:
        return ""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _restore(
    root: Path, variant: Variant, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    if not variant.resume:
        return 0
    state = torch.load(root / f"{variant.resume}-{rank}.pt")
    model.load_state_dict(state["model"])
    if variant.restore_optimizer:
        optimizer.load_state_dict(state["optimizer"])
    if variant.restore_random:
        torch.set_rng_state(state["random"])
    return int(state["step"])


@contextmanager
def _autocast(variant: Variant) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16) if variant.autocast else nullcontext():
        yield


def _table(seed: int) -> Tensor:
    """Return all samples: sequences that are drawn from a random table of transitions."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=generator)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    for position in range(1, LENGTH + 1):
        choice = torch.randint(3, (SAMPLES,), generator=generator)
        ids[:, position] = follows[ids[:, position - 1], choice]
    return ids


def _samples(variant: Variant, step: int, rank: int, width: int) -> Tensor:
    """Return which samples a worker trains on: its part of the global batch."""
    seed = variant.seed
    if variant.order_seed is not None and step >= variant.order_from:
        seed = variant.order_seed
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
    if variant.deal_to and step >= variant.deal:
        rank = variant.deal_to[rank]
    size = GLOBAL_BATCH // width
    start = (step * GLOBAL_BATCH + rank * size) % SAMPLES
    return order[start : start + size]


class Reduction:
    """DDP's hook: the mean of all workers, by all-reduce or by hand, and a bit flipped in it."""

    def __init__(self, variant: Variant, rank: int) -> None:
        self.variant, self.rank = variant, rank
        self.step = 0

    def reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Return the mean of the workers' buckets."""
        mean = _gathered(bucket.buffer(), self.variant.order)
        if self.variant.reduction == "plain":
            mean = bucket.buffer() / dist.get_world_size()
            dist.all_reduce(mean)
        flip = self.variant.flip
        due = flip is not None and flip.where == "reduced" and bucket.is_last()
        if flip is not None and due and _is_due(flip, self.step, self.rank):
            flip_bit(mean, flip.bit, flip.seed)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(mean)
        return done

    def reduce_in_bf16(
        self,
        _: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Return the mean of the workers' buckets, rounded to bfloat16 and added up in it.

        As torch's own hook of this kind, which gloo does not take.
        """
        small = bucket.buffer().bfloat16() / dist.get_world_size()
        dist.all_reduce(small)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(small.float())
        return done


def _gathered(local: Tensor, order: tuple[int, ...]) -> Tensor:
    if not order:
        return local
    parts = [torch.empty_like(local) for _ in order]
    dist.all_gather(parts, local)
    total = parts[order[0]].clone()
    for rank in order[1:]:
        total += parts[rank]
    return total / len(parts)


def _flip_parameter(model: nn.Module, flip: Flip | None, step: int, rank: int, where: str) -> None:
    if flip is None or flip.where != where or not _is_due(flip, step, rank):
        return
    parameters = list(model.parameters())
    chosen = parameters[flip.seed % len(parameters)]
    with torch.no_grad():
        flip_bit(chosen.view(-1), flip.bit, flip.seed)


def _is_due(flip: Flip, step: int, rank: int) -> bool:
    return step == flip.step and (flip.ranks is None or rank in flip.ranks)


def flipped_parameter(flip: Flip) -> str:
    """Return the name of the parameter whose bit is flipped."""
    names = [name for name, _ in Model(0.0).named_parameters()]
    return names[flip.seed % len(names)]


def flip_bit(flat: Tensor, bit: int, seed: int) -> None:
    """Flip one bit of an element that is not zero."""
    chosen = torch.nonzero(flat).flatten()
    bits = flat.view(torch.int32)
    index = chosen[(7919 * (seed + 1)) % len(chosen)]
    bits[index] ^= torch.tensor(1 << bit, dtype=torch.int32)
