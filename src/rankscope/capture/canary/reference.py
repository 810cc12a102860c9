"""The reference step on one worker: each micro-batch's gradient, computed again by itself.

What entered the model, the random generators, small buffers and the autocast are kept as each
forward pass begins, and the gradients that the training's own backward pass brings to what the
model has returned. From these the plain module computes the gradient of each micro-batch once
more, before the optimizer changes the parameters: without the wrapper, without adding up in
``.grad``, and without the loss function, which may be anywhere.

What is kept of a gradient are its norm and a sketch of each parameter. Sketches are linear, so
micro-batches and workers are added up elsewhere, in float64 and in a fixed order. A sketch holds
each element of a parameter that is no longer than it, and of any other tells the norm of a
difference to within ``sqrt(2/k)`` of itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankscope.capture.canary.alone import ACCUMULATES, Autocast, alone
from rankscope.capture.canary.batch import CanaryDeclined, capture_batch, restore_batch
from rankscope.capture.canary.cost import check_gradient_room
from rankscope.capture.canary.replay import check_graph, check_module, in_short, project
from rankscope.capture.canary.state import NotPutBackError, generators_of, kept
from rankscope.capture.canary.tensors import AT_ONCE_BYTES
from rankscope.capture.names import canonical_name
from rankscope.capture.passes import hook_gradient, tensors_in
from rankscope.capture.sketch import Sketcher
from rankscope.capture.totals import GradientTotals
from rankscope.core.groups import Groups
from rankscope.core.reference import Part, width_for

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
            alone(self._device, run, self._autocast),
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


class Held(Protocol):
    """A model as a reference step takes it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trained parameters ``[P]``."""

    @property
    def types(self) -> tuple[str, ...]:
        """The coarser type of those in which each gradient is added up and kept ``[P]``."""

    @property
    def copies(self) -> int:
        """How many workers hold each element of the reduced gradient."""

    @property
    def summed_workers(self) -> float:
        """How many workers' gradients make a reduced one: 1 for their mean, W for their sum."""

    def check(self) -> None:
        """Check that a worker can run the model alone.

        Raises:
            CanaryDeclined: It cannot.
        """

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure what this worker holds of ``.grad``."""

    def plain(self) -> AbstractContextManager[tuple[nn.Module, Sequence[Tensor]]]:
        """Give what runs alone, and its trained parameters in the order of ``names``."""


class WholeModel:
    """A model that each worker holds, as under DDP.

    Args:
        module: The model itself.
        num_workers: W.
    """

    summed_workers = 1.0

    def __init__(self, module: nn.Module, num_workers: int) -> None:
        named = [(canonical_name(n), p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in named)
        self.types = tuple(str(p.dtype).removeprefix("torch.") for _, p in named)
        self.copies = num_workers
        self._module, self._parameters = module, [parameter for _, parameter in named]

    def check(self) -> None:
        """Check that a worker can run it alone: see :func:`check_module`."""
        check_module(self._module)
        check_gradient_room(self._parameters, self._parameters[0].device)

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure ``.grad``."""
        _measure(sketcher, self.names, [p.grad for p in self._parameters], into)

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Give the model itself."""
        yield self._module, self._parameters


class ReferenceStep:
    """Measures what one worker knows of a step whose gradient is computed again.

    Args:
        held: The model.
        device: The device of its gradients.
        num_workers: W, which together send so much.
        seed: Seed of all signs; equal on all workers.
    """

    def __init__(self, held: Held, device: torch.device, num_workers: int, seed: int) -> None:
        self._held, self._device = held, device
        self._num_workers, self._seed = num_workers, seed
        self._sketcher: Sketcher | None = None
        self._reduced: GradientTotals | None = None

    def see_reduced(self, num_micro: int) -> None:
        """Measure ``.grad`` as the reduction has left it; the last call counts.

        Args:
            num_micro: Micro-batches of the step so far.

        Raises:
            CanaryDeclined: What would be sent of it is too much.
        """
        sketcher = self._prepare(num_micro)
        self._reduced = self._measure_grad(sketcher)

    def check(self, num_micro: int) -> None:
        """Check that the gradient can be computed again, as far as is known before.

        Raises:
            CanaryDeclined: It cannot.
        """
        self._held.check()
        self._prepare(num_micro)

    def compute(self, micro_batches: Sequence[MicroBatch]) -> Part:
        """Measure ``.grad``, compute every micro-batch's gradient again, and wait for the device.

        The last one is computed twice: operations that add in any order show there.

        Raises:
            CanaryDeclined: It cannot be computed.
            NotPutBackError: Something that was changed could not be put back.
        """
        sketcher = self._prepare(len(micro_batches))
        given = self._measure_grad(sketcher)
        with self._held.plain() as (module, parameters):
            each = [
                self._gradient_of(micro, module, parameters, sketcher)
                for micro in (*micro_batches, micro_batches[-1])
            ]
        *terms, again = each
        again.subtract(terms[-1])
        none = given.sketches.new_zeros(0, sketcher.width)
        reduced = none if self._reduced is None else self._reduced.sketches
        part = Part(
            names=self._held.names,
            types=self._held.types,
            copies=self._held.copies,
            summed_workers=self._held.summed_workers,
            terms_MPK=torch.stack([term.sketches for term in terms]).cpu().numpy(),
            norms_MP=torch.stack([term.squared_norms for term in terms]).sqrt().cpu().numpy(),
            given_PK=given.sketches.cpu().numpy(),
            reduced_PK=reduced.cpu().numpy(),
            unsteady_P=again.sketches.double().norm(dim=1).cpu().numpy(),
        )
        self.end()
        return part

    def end(self) -> None:
        """Let go of what the step has left."""
        self._sketcher = self._reduced = None

    def _prepare(self, num_micro: int) -> Sketcher:
        """Return what measures so many gradients, in sketches as wide as they may be."""
        names = self._held.names
        width = width_for(len(names), num_micro, self._num_workers)
        if not width:
            raise CanaryDeclined(
                f"{len(names)} parameters, {num_micro} micro-batches and "
                f"{self._num_workers} workers would be too much to send"
            )
        if self._sketcher is None or self._sketcher.width != width:
            groups = Groups(names, {name: at for at, name in enumerate(names)})
            self._sketcher = Sketcher(self._device, groups, width, self._seed)
            self._reduced = None
        return self._sketcher

    @torch.no_grad()
    def _measure_grad(self, sketcher: Sketcher) -> GradientTotals:
        totals = sketcher.new_totals()
        self._held.measure(sketcher, totals)
        return totals

    def _gradient_of(
        self,
        micro: MicroBatch,
        module: nn.Module,
        parameters: Sequence[Tensor],
        sketcher: Sketcher,
    ) -> GradientTotals:
        try:
            found = micro.gradients(module, parameters)
            totals = sketcher.new_totals()
            _measure(sketcher, self._held.names, found, totals)
        except (CanaryDeclined, NotPutBackError):
            raise
        except Exception as error:
            why = f"a micro-batch could not be run once more ({in_short(error)})"
            raise CanaryDeclined(why) from error
        return totals


@torch.no_grad()
def _measure(
    sketcher: Sketcher, names: Sequence[str], gradients: Gradients, into: GradientTotals
) -> None:
    here = [(n, g) for n, g in zip(names, gradients, strict=True) if g is not None]
    sketcher.measure_many([(name, gradient.detach(), 0) for name, gradient in here], into)


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
