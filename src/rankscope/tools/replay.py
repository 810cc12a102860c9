"""Runs the batches of a replay bundle on a model: in this process, or on all ranks of torchrun."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.bus.bundles import PlainBatch, ReplayBundle
from rankscope.bus.canary import (
    CanaryCause,
    CanaryResults,
    CanaryVerdict,
    explain,
    judge,
)
from rankscope.bus.replicas import minority_ranks
from rankscope.errors import RunError, UsageError
from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch, samples_of
from rankscope.evidence.canary.combine import compare_programs
from rankscope.evidence.canary.replay import (
    CanaryResult,
    check_module,
    loss_without_gradient,
    run_batch,
    state_digest,
)
from rankscope.files import open_file
from rankscope.stats.arrays import MISSING_INT
from rankscope.tools.functions import find_function

WORST = 5  # samples that are listed, those whose loss is NaN and then those with the largest


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """The loss of one sample, run alone in evaluation mode; ``index`` is its place in the batch."""

    index: int
    digest: int
    loss: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: what each rank computed, and the verdict on it.

    ``worst`` are the suspect's samples with the largest loss, where the verdict is data; those
    whose loss is NaN come first. ``peer_median`` is the median loss of the peer's samples (NaN when
    unknown); ``note``: why there are no samples, if so.
    """

    results: CanaryResults
    verdict: CanaryVerdict
    worst: list[SampleLoss] = field(default_factory=list)
    peer_median: float = np.nan
    note: str = ""


def load_model(name: str, checkpoint: Path | None) -> nn.Module:
    """Return the model that the function ``MODULE:FUNCTION`` makes, with a checkpoint's parameters.

    The module may lie in the working directory; the checkpoint is a state dict, as safetensors or
    as ``torch.save`` writes it. torch's generators are seeded before, so that all ranks begin with
    the same parameters. UsageError without such a function or model, RunError if the checkpoint
    cannot be used.
    """
    try:
        make = find_function("--model", name)
        torch.manual_seed(0)  # importing the module may have seeded by rank
        model = make()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--model expects a function without arguments that returns the model, and {name} "
            f"raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model expects a function that returns a torch.nn.Module, and {name} returned a "
            f"{type(model).__name__}"
        )
    if checkpoint is not None:
        _load_checkpoint(model, checkpoint)
    return model


@contextmanager
def join_ranks() -> Iterator[None]:
    """Join the other ranks of a torchrun job, if this is one, until the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def replay(bundle: ReplayBundle, model: nn.Module) -> Replayed | None:
    """Run the suspect's batch twice and the peer's once on every rank, and compare.

    The model runs in training mode. Under torchrun all ranks call it; rank 0 alone gets a result.
    RunError if this rank cannot run the batches.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        check_module(model)
        own = _run(bundle, model.train(), device)
    except CanaryDeclined as error:
        raise RunError(f"these batches cannot be replayed on this model: {error}") from error
    rows_W = _gather(own)
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    results = _results(bundle, [row.results for row in rows_W])
    verdict = judge(results, differing=minority_ranks([row.state for row in rows_W]))
    programs_W = [row.program for row in rows_W if row.program is not None]
    if verdict.verdict is not CanaryCause.DATA and len(programs_W) == len(rows_W):
        verdict = explain(verdict, compare_programs(programs_W, verdict.ranks))
    if verdict.verdict is not CanaryCause.DATA:
        return Replayed(results, verdict)
    return _with_samples(bundle, model.eval(), device, Replayed(results, verdict))


def as_inputs(module: nn.Module, batch: Any) -> PlainBatch:
    """Return a batch as inputs of the model's forward pass.

    A mapping enters by name, a sequence by position: all of it, or its first part where the forward
    pass takes fewer (the labels then belong to a loss outside of the model). CanaryDeclined where
    it cannot enter the model, or be kept.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        args = tuple(batch)
        if not _takes(module, args):
            args = args[:1]
    elif isinstance(batch, Tensor):
        args = (batch,)
    else:
        raise CanaryDeclined(f"a batch of the kind {type(batch).__name__} cannot enter the model")
    return capture_batch(args, kwargs, moves_inputs=True).plain()


def _takes(module: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args)
    except TypeError:
        return False
    return True


def digest_of_run(module: nn.Module, batch: PlainBatch, device: torch.device, *, seed: int) -> int:
    """Run a batch, forward and backward; return a digest of all bits of loss and gradient."""
    return run_batch(module, batch, device, seed=seed).read().digest


class _Row(NamedTuple):
    """One rank's results of the suspect's batch, of its second run, and of the peer's batch.

    ``state`` is a digest of parameters and buffers; ``program`` is what the first run's forward
    pass ran, None if unknown.
    """

    results: tuple[CanaryResult, CanaryResult, CanaryResult]
    state: int
    program: Mapping[str, Any] | None


def _run(bundle: ReplayBundle, model: nn.Module, device: torch.device) -> _Row:
    suspect, peer = bundle.batches
    seed = bundle.seed
    with _autocast(bundle, device):
        first = run_batch(model, suspect, device, seed=seed, record=True)
        again = run_batch(model, suspect, device, seed=seed, backward_seed=seed + 1)
        against = run_batch(model, peer, device, seed=seed)
    results = first.read(), again.read(), against.read()
    program = None if first.program is None else first.program.read()
    return _Row(results, state_digest(model), program)


def _autocast(bundle: ReplayBundle, device: torch.device) -> AbstractContextManager[Any]:
    if not bundle.autocast:
        return nullcontext()
    dtype = getattr(torch, bundle.autocast, None)
    if not isinstance(dtype, torch.dtype):
        raise RunError(f"the bundle names autocast to {bundle.autocast!r}, which is no type")
    return torch.autocast(device.type, dtype=dtype)


def _gather(own: _Row) -> list[_Row]:
    """Return the rows of all ranks, in rank order."""
    if not dist.is_initialized():
        return [own]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own, group=dist.new_group(backend="gloo"))
    return rows


def _results(
    bundle: ReplayBundle, results_W: list[tuple[CanaryResult, CanaryResult, CanaryResult]]
) -> CanaryResults:
    first_W, again_W, against_W = zip(*results_W, strict=True)

    def column(run_W: Sequence[CanaryResult], name: str) -> Any:
        return np.array([getattr(one, name) for one in run_W])

    return CanaryResults(
        suspect=bundle.suspect,
        peer=bundle.peer,
        losses_W=column(first_W, "loss"),
        norms_W=column(first_W, "grad_norm"),
        digests_W=column(first_W, "digest"),
        again_W=column(again_W, "digest"),
        again_losses_W=column(again_W, "loss"),
        again_norms_W=column(again_W, "grad_norm"),
        peer_losses_W=column(against_W, "loss"),
        peer_norms_W=column(against_W, "grad_norm"),
        peer_digests_W=column(against_W, "digest"),
        projected=all(one.projected for one in first_W),
        unit=max(one.unit for one in first_W),
    )


def _with_samples(
    bundle: ReplayBundle, model: nn.Module, device: torch.device, replayed: Replayed
) -> Replayed:
    suspect, peer = bundle.batches

    def losses(batch: PlainBatch) -> list[SampleLoss]:
        with _autocast(bundle, device):
            return [
                SampleLoss(
                    index,
                    int(sample.samples[0]) if len(sample.samples) else MISSING_INT,
                    loss_without_gradient(model, sample, device, seed=bundle.seed),
                )
                for index, sample in enumerate(samples_of(batch))
            ]

    try:
        own = losses(suspect)
        others = losses(peer)
    except CanaryDeclined as error:
        note = f"the samples cannot be run one by one: {error}"
        return Replayed(replayed.results, replayed.verdict, note=note)
    if not own:
        note = "no samples were recognised in the batch"
        return Replayed(replayed.results, replayed.verdict, note=note)
    worst = sorted(own, key=lambda sample: (not np.isnan(sample.loss), -sample.loss))[:WORST]
    known = [sample.loss for sample in others if not np.isnan(sample.loss)]
    median = float(np.median(known)) if known else np.nan
    return Replayed(replayed.results, replayed.verdict, worst, median)


def _load_checkpoint(model: nn.Module, file: Path) -> None:
    try:
        open_file(file).close()  # a pipe would be waited for
        if file.suffix == ".safetensors":
            load: Callable[[Path], Any] = importlib.import_module("safetensors.torch").load_file
            state = load(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"cannot read the checkpoint {file} ({error})") from error
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise RunError(
            f"expected a state dict of tensors in {file}, as model.state_dict() returns it, got a "
            f"{type(state).__name__} of other things"
        )
    prefix = "module."
    if state and all(name.startswith(prefix) for name in state):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"the checkpoint {file} does not fit the model ({error})") from error
