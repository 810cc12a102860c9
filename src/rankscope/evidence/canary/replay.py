"""A canary on one worker: a given batch, forward and backward, without side effects.

It runs the model inside the data-parallel wrapper, so that workers do not communicate, and computes
gradients with ``torch.autograd.grad``: nothing is added to any ``.grad``, and neither hooks on
accumulated gradients nor those of the wrapper fire. A model that accumulates by itself is declined,
see :mod:`rankscope.evidence.canary.alone`. All random generators are seeded alike on every worker.
Afterwards all state is restored, see :mod:`rankscope.evidence.canary.state`.
"""

import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.bus.bundles import PlainBatch
from rankscope.bus.canary import SINGLE
from rankscope.bus.probe import Awaited, MessagePart
from rankscope.evidence.canary.alone import ACCUMULATES, alone
from rankscope.evidence.canary.batch import CanaryDeclined, restore_batch
from rankscope.evidence.canary.combine import NAMES
from rankscope.evidence.canary.cost import Stopwatch, check_gradient_room, is_out_of_memory
from rankscope.evidence.canary.program import ProgramRecorder, program_digest
from rankscope.evidence.canary.state import NotPutBackError, preserved_state
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.host import HostCopy
from rankscope.gradients.totals import fold_signs
from rankscope.wrappers.passes import tensors_in

_log = logging.getLogger("rankscope")

_COARSE_PRODUCTS = 2.0**-11  # unit roundoff of products in TensorFloat-32
_PERIOD = 8191  # of the signs of the projection of outputs
_COMMUNICATING = ("SyncBatchNorm", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine")


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """One worker's result on a batch."""

    loss: float  # its loss, or a projection of the outputs where the model returns no loss
    grad_norm: float  # L2 norm of its gradient
    digest: int  # 64-bit digest of all bits of both
    projected: bool = False  # ``loss`` is a projection
    unit: float = SINGLE  # unit roundoff of the coarsest type in the forward pass


class PendingResult:
    """A result that may still be on the device: scalars, the digest as int64."""

    def __init__(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        digest: Tensor,
        *,
        projected: bool = False,
        unit: float = SINGLE,
    ) -> None:
        self.program: Awaited[dict[str, Any]] | None = (
            None  # what the forward pass ran, if recorded
        )
        self._projected = projected
        self._unit = unit
        self._loss = HostCopy(loss.double())
        self._norm = HostCopy(grad_norm.double())
        self._digest = HostCopy(digest)

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        recorded = self.program is None or self.program.ready
        return recorded and self._loss.ready and self._norm.ready and self._digest.ready

    def read(self) -> CanaryResult:
        """Wait for the device and return the result."""
        loss = float(self._loss.numpy())
        norm = float(self._norm.numpy())
        return CanaryResult(loss, norm, int(self._digest.numpy()), self._projected, self._unit)


@dataclass(frozen=True, slots=True)
class PendingCanary:
    """One worker's results of a canary, which may still be on the device."""

    suspect: int  # rank whose batch was run twice
    peer: int  # rank whose batch was run once
    results: tuple[PendingResult, PendingResult, PendingResult] | None = None  # None: a request
    took: Stopwatch | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        timed = self.took is None or self.took.ready
        return timed and (self.results is None or all(result.ready for result in self.results))

    def read(self) -> MessagePart:
        """Wait for the device and return LOCAL columns."""
        if self.results is None:
            return MessagePart({"canary_of": self.suspect})
        first, again, against = (result.read() for result in self.results)
        values = {
            "canary_of": self.suspect,
            "canary_loss": first.loss,
            "canary_norm": first.grad_norm,
            "canary_digest": first.digest,
            "canary_again": again.digest,
            "canary_again_loss": again.loss,
            "canary_again_norm": again.grad_norm,
            "canary_against": self.peer,
            "canary_against_loss": against.loss,
            "canary_against_norm": against.grad_norm,
            "canary_against_digest": against.digest,
            "canary_projected": first.projected,
            "canary_unit": first.unit,
            "canary_seconds": math.nan if self.took is None else self.took.seconds,
        }
        recorded = self.results[0].program
        if recorded is None:
            return MessagePart(values)
        program = recorded.read()
        values["canary_program"] = program_digest(program)
        return MessagePart(values, names={NAMES: program})


def run_batch(
    module: nn.Module,  # itself, not its data-parallel wrapper
    batch: PlainBatch,  # inputs of its forward pass
    device: torch.device,
    *,
    seed: int,
    backward_seed: int | None = None,  # matters if that pass draws numbers by itself
    record: bool = False,  # what the forward pass runs
) -> PendingResult:
    """Run a batch through a model, forward and backward, and put everything back.

    It runs under the autocast in force, with each module in its present mode (training or
    evaluation).
    """
    try:
        check_module(module)
        parameters = [p for p in module.parameters() if p.requires_grad]
        check_gradient_room(parameters, device)
        args, kwargs = restore_batch(batch, device)
        recorder = _recorder_of(module, device) if record else None
        see = None if recorder is None else recorder.see
        with preserved_state(module, device, seed=seed) as run, alone(device, run, see=see):
            if recorder is not None:
                recorder.begin(args, kwargs)
            output = module(*args, **kwargs)
            loss = loss_of(output)
            unit = _unit_roundoff(module, output, device)
            if recorder is not None:
                recorder.end()
            check_graph(loss, run.nodes)
            if backward_seed is not None:
                run.seed(backward_seed)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if any(parameter.grad is not None for parameter in parameters):
                raise CanaryDeclined(ACCUMULATES)
        with torch.no_grad():
            projected = loss_in(output) is None
            result = _result(loss.detach(), gradients, projected=projected, unit=unit)
        result.program = None if recorder is None else recorder.pending()
        return result
    except (CanaryDeclined, NotPutBackError):
        raise
    except Exception as error:
        full = is_out_of_memory(error)
        why = f"the canary could not be run ({in_short(error)})"
        raise CanaryDeclined(why, out_of_memory=full) from (None if full else error)


def _recorder_of(module: nn.Module, device: torch.device) -> ProgramRecorder | None:
    """Return a recorder of what the model runs; None where a part of it cannot be read."""
    try:
        return ProgramRecorder(module, device)
    except Exception as error:
        _log.debug("what a canary runs is not recorded: %r", error)
        return None


def loss_without_gradient(
    module: nn.Module, batch: PlainBatch, device: torch.device, *, seed: int
) -> float:
    """Return the loss of a batch, forward only; waits for the device."""
    try:
        args, kwargs = restore_batch(batch, device)
        with (
            preserved_state(module, device, seed=seed) as run,
            alone(device, run),
            torch.no_grad(),
        ):
            return float(loss_of(module(*args, **kwargs)))
    except (CanaryDeclined, NotPutBackError):
        raise
    except Exception as error:
        raise CanaryDeclined(f"the batch could not be run ({in_short(error)})") from error


def state_digest(module: nn.Module) -> int:
    """Return a digest of all parameters and buffers; waits for the device."""
    tensors = [*module.parameters(), *module.buffers()]
    total = 0
    for place, tensor in enumerate(tensors):
        total = (total * 31 + int(digest_tensor(tensor)) + place) % 2**63
    return total


def check_module(module: nn.Module) -> None:
    """Check that a model can run on one worker alone."""
    for part in module.modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _COMMUNICATING:
                raise CanaryDeclined(
                    "a canary runs on each worker alone, and the model has a layer of type "
                    f"{kind.__name__}, which needs the others in every forward pass"
                )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise CanaryDeclined(
            "a canary runs on each worker alone, and the model's parameters are spread over "
            "several (tensor parallel or sharded)"
        )


def _unit_roundoff(module: nn.Module, output: Any, device: torch.device) -> float:
    """Return the unit roundoff of the coarsest type in a forward pass that has just run."""
    tensors = [*module.parameters(), *tensors_in(output)]
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        types.add(torch.get_autocast_dtype(device.type))
    units = [torch.finfo(dtype).eps / 2 for dtype in types]
    coarse = torch.get_float32_matmul_precision() != "highest"
    return max([*units, _COARSE_PRODUCTS if coarse else SINGLE])


def _result(
    loss: Tensor, gradients: Sequence[Tensor | None], *, projected: bool, unit: float
) -> PendingResult:
    present = [gradient for gradient in gradients if gradient is not None]
    dense = [g.to_dense() if g.layout is not torch.strided else g for g in present]
    squares = [g.to(loss.device, torch.float32).square().sum() for g in dense]
    norm = torch.stack(squares).sum().sqrt() if squares else loss.new_zeros(())
    digest = digest_tensor(loss)
    for gradient in gradients:
        own = 0 if gradient is None else digest_tensor(gradient).to(digest.device)
        digest = digest * _MIX + own
    return PendingResult(loss.reshape(()), norm, digest, projected=projected, unit=unit)


_MIX = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed number


def check_graph(loss: Tensor, foreign: Set[Any]) -> None:
    """Check that the gradients of a loss can be computed one by one, in a graph of its own.

    Reentrant checkpointing can only accumulate them, and hides its parameters. A backward pass
    through a graph that the training still needs, behind a hidden state, would release it: its
    nodes are ``foreign``.
    """
    nodes = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in foreign:
            raise CanaryDeclined(
                "a canary runs a batch by itself, and the model's state goes on with a graph of "
                "the steps before, which its backward pass would release"
            )
        if "CheckpointFunction" in node.name():
            raise CanaryDeclined(
                "a canary leaves all gradients alone, which reentrant checkpointing does not "
                "allow; torch.utils.checkpoint with use_reentrant=False does"
            )
        nodes += [following for following, _ in node.next_functions]


def in_short(error: Exception) -> str:
    """Return an error as one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model's output holds, or else a projection of all outputs.

    The projection is the sum of each floating-point output times a fixed pattern of signs, in
    float32: it has a gradient, and a change of any element changes it.
    """
    loss = loss_in(output)
    if loss is not None:
        return loss
    floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not floating:
        raise CanaryDeclined("the model returns no loss and no floating-point tensor")
    device = floating[0].device
    with torch.autocast(device.type, enabled=False):
        return torch.stack([project(tensor).to(device) for tensor in floating]).sum()


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that a model's output holds; None where it holds none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return loss if loss.numel() == 1 else loss.float().mean()
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output.float()
    return None


def project(output: Tensor) -> Tensor:
    """Return the sum of a tensor times a fixed pattern of signs, over the root of its size."""
    flat = output.reshape(-1).float()
    rows = flat.numel() // _PERIOD
    signs = fold_signs(_PERIOD, 1, flat.device)
    body = flat[: rows * _PERIOD]
    tail = flat[rows * _PERIOD :]
    row_signs = fold_signs(rows, 2, flat.device)
    total = ((body.reshape(rows, _PERIOD) * signs).sum(1) * row_signs).sum()
    return (total + (tail * signs[: len(tail)]).sum()) / math.sqrt(max(flat.numel(), 1))
