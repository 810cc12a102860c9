"""One micro-batch of a reference step: what is kept of its forward and backward pass, to run again.

What entered the model, the random generators, small buffers and the autocast are kept as the
forward pass begins, and the gradients that the training's own backward pass brings to what the
model has returned. So its gradient is computed once more without the loss function, which may be
anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.capture.canary.alone import ACCUMULATES, Autocast, alone
from rankscope.capture.canary.batch import CanaryDeclined, capture_batch, restore_batch
from rankscope.capture.canary.replay import check_graph, project
from rankscope.capture.canary.state import generators_of, kept
from rankscope.capture.canary.tensors import AT_ONCE_BYTES
from rankscope.capture.passes import hook_gradient, tensors_in

MOST_BATCH_BYTES = 2**30
"""Larger micro-batches are not kept; they stay in this process."""

_EXACT, _COARSE = 4e-6, 0.25
"""How far what a forward pass returns may lie from what it has returned in the training: relative
in float32, and in roundings of 16 bits."""

Gradients = Sequence[Tensor | None]


class MicroBatch:
    """One forward pass of a training, and what its backward pass brought to what it returned.

    Args:
        module: The model itself, not its data-parallel wrapper.
        device: The device of its parameters.
        args: What enters it by position.
        kwargs: What enters it by name.

    Raises:
        CanaryDeclined: It cannot be kept.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._batch = capture_batch(args, kwargs, most_bytes=MOST_BATCH_BYTES)
        self._generators = generators_of(module, device)
        self._autocast = Autocast.in_force(device)
        self._buffers = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in module.named_buffers()
            if buffer.nbytes <= AT_ONCE_BYTES
        }
        self._device = device
        self._returned: list[_Returned] = []

    @property
    def trained(self) -> bool:
        """Whether some gradient has come back."""
        return any(one.arrived for one in self._returned)

    @torch.no_grad()
    def see_output(self, output: object) -> None:
        """Take what the forward pass has returned; hooks in its graph see what comes back."""
        tensors = _differentiable(output)
        above = _behind(tensors)
        self._returned = [
            _Returned(tensor, compared=not numbers)
            for tensor, numbers in zip(tensors, above, strict=True)
        ]
        for one, numbers in zip(self._returned, above, strict=True):
            one.above = [self._returned[number] for number in numbers]
        for one, tensor in zip(self._returned, tensors, strict=True):
            hook_gradient(tensor, one.take)

    def gradients(self, module: nn.Module, parameters: Sequence[Tensor]) -> Gradients:
        """Compute the gradients of what the training's backward pass was called on, once more.

        Args:
            module: The model, or a plain copy, with the parameters of the forward pass.
            parameters: Whose gradients are asked for.

        Returns:
            One for each; None where it has no part in the loss.

        Raises:
            CanaryDeclined: It cannot be computed, or the forward pass does not repeat itself.
            NotPutBackError: Something that it has changed could not be put back.
        """
        args, kwargs = restore_batch(self._batch.plain(), self._device)
        with (
            kept(module, self._device, seed=None) as run,
            alone(self._device, run.before_write, self._autocast),
        ):
            self._generators.put_back()
            self._fill_buffers(module)
            tensors = _differentiable(module(*args, **kwargs))
            self._compare(tensors)
            tops, rest = self._used(tensors)
            for tensor, _ in tops:
                check_graph(tensor, run.nodes)
            with tops[0][1].backward.again(self._device):
                found = torch.autograd.grad(
                    [tensor for tensor, _ in tops],
                    [*parameters, *(tensor for tensor, _ in rest)],
                    [one.gradient for _, one in tops],
                    allow_unused=True,
                )
            if any(parameter.grad is not None for parameter in parameters):
                raise CanaryDeclined(ACCUMULATES)
            for (_, one), inside in zip(rest, found[len(parameters) :], strict=True):
                one.check_inside(inside)
            return found[: len(parameters)]

    @torch.no_grad()
    def _fill_buffers(self, module: nn.Module) -> None:
        """Put into small buffers what they held in the training, but where they hold it still."""
        for name, buffer in module.named_buffers():
            known, version, before = self._buffers.get(name, (None, 0, buffer))
            if buffer is not known or buffer._version != version:
                buffer.copy_(before)

    def _used(self, tensors: Sequence[Tensor]) -> "tuple[_Pairs, _Pairs]":
        """Return what was returned with the gradients that start here, and what lies behind it."""
        pairs = list(zip(tensors, self._returned, strict=True))
        tops = [(tensor, one) for tensor, one in pairs if one.gradient is not None]
        return tops, [(tensor, one) for tensor, one in pairs if one.norm is not None]

    @torch.no_grad()
    def _compare(self, tensors: Sequence[Tensor]) -> None:
        """Check that the forward pass has returned the same again."""
        if [tensor.shape for tensor in tensors] != [one.shape for one in self._returned]:
            raise CanaryDeclined("the model returns other tensors when a batch is run once more")
        coarse = self._autocast.dtype if self._autocast.enabled else torch.float32
        for tensor, one in zip(tensors, self._returned, strict=True):
            if one.projection is None:
                continue
            eps = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, coarse))
            far = float((project(tensor) - one.projection).abs())
            size = float(one.projection.abs() + one.spread)
            if not far <= (_EXACT if eps < 1e-6 else _COARSE * eps) * size:
                raise CanaryDeclined(
                    f"the forward pass does not repeat itself (relative difference {far / size:.1e}"
                    "): it draws random numbers from generators of its own, counts its calls, or "
                    "reads something that has changed"
                )


class _Returned:
    """A tensor that the training's forward pass has returned.

    Args:
        tensor: The tensor.
        compared: Whether it is to be compared: what others were computed from need not be.

    Attributes:
        above: What the model returned that was computed from it, such as the loss from logits.
        gradient: What came back to it, where that does not come through those.
        norm: The norm of what came back, where it may come through those.
        arrived: Whether anything came back.
        backward: The autocast in which it did.
    """

    def __init__(self, tensor: Tensor, *, compared: bool) -> None:
        self.shape = tensor.shape
        self.projection = project(tensor) if compared else None
        self.spread = _norm(tensor) / tensor.numel() ** 0.5
        self.above: list[_Returned] = []
        self.gradient: Tensor | None = None
        self.norm: Tensor | None = None
        self.arrived = False
        self.backward = Autocast.in_force(tensor.device)

    def take(self, gradient: Tensor) -> None:
        """Take what a backward pass brings."""
        self.arrived, self.backward = True, Autocast.in_force(gradient.device)
        with torch.no_grad():
            if any(one.arrived for one in self.above):
                self.norm = _norm(gradient)
            elif self.gradient is None:
                self.gradient = gradient.detach().clone()
            else:
                self.gradient = self.gradient + gradient

    def check_inside(self, inside: Tensor | None) -> None:
        """Check that what came back came through what was computed from it, all of it.

        Raises:
            CanaryDeclined: It did not: the loss takes several of the model's tensors.
        """
        norm = 0.0 if inside is None else float(_norm(inside))
        seen = float(self.norm) if self.norm is not None else 0.0
        if not abs(norm - seen) <= 0.01 * seen:
            raise CanaryDeclined(
                "the loss takes what the model returns from several places, one of which was "
                "computed from another, and what came back to each by itself is not known"
            )


_Pairs = list[tuple[Tensor, _Returned]]


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, which may be large, without a copy in another type."""
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
    return norm


def _differentiable(output: object) -> list[Tensor]:
    """Return the tensors of an output that have a graph, each once, in order."""
    found = {id(tensor): tensor for tensor in tensors_in(output) if tensor.grad_fn is not None}
    return list(found.values())


def _behind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return for each tensor the numbers of those that were computed from it."""
    places: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        places.setdefault((tensor.grad_fn, tensor.output_nr), []).append(number)
    above: list[list[int]] = [[] for _ in tensors]
    for number, tensor in enumerate(tensors):
        seen: set[Any] = set()
        waiting = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            for edge in node.next_functions:
                for other in places.get(edge, ()):
                    if other != number and number not in above[other]:
                        above[other].append(number)
    return above
