"""One micro-batch of a reference step: its forward and backward pass, saved to run again.

Saved are the inputs of the model, the random generators, small buffers and the autocast as the
forward pass begins, and the gradients of the model's outputs in the training's own backward pass.
So the gradient of the parameters is computed once more without the loss function.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.bus.words import shortened
from rankscope.evidence.canary.alone import ACCUMULATES, Autocast, alone
from rankscope.evidence.canary.batch import CanaryDeclined, capture_batch, restore_batch
from rankscope.evidence.canary.cost import is_out_of_memory
from rankscope.evidence.canary.layout import Layout, layout_of, part_in, whole_of
from rankscope.evidence.canary.replay import check_graph, in_short, project
from rankscope.evidence.canary.state import AT_ONCE_BYTES, generators_of, preserved_state
from rankscope.evidence.reference.attached import AttachedLosses
from rankscope.evidence.reference.direct import Edge
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.passes import hides_tensors, hook_gradient, tensors_in
from rankscope.wrappers.ranks import local_of
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from rankscope.evidence.reference.loss_tape import LossTape

MOST_BATCH_BYTES = 2**30
"""Larger micro-batches are declined; they stay in this process."""

LOST = "what a backward pass brought could not be kept ({})"

_EXACT = 4e-6
"""Largest relative distance of the outputs from those in the training, in float32."""

_COARSE = 0.25
"""The same in a 16-bit type, in roundings."""

_SLACK = 32.0
"""Factor on both, where layers round otherwise than in the training."""

_TINY = 1e-300
_MOST_NAMED = 3
_ELEMENTS = 1 << 22  # of logits, whose products would need eight bytes each
_FAILS = (
    "the model's forward pass raises {} outside of the training's own call, as where that is in a "
    "context"
)
_OTHER_TENSORS = "the model returns other tensors when a batch is run once more"
_NOT_REPEATED = (
    "the forward pass does not repeat itself {}: it draws random numbers from generators of its "
    "own, counts its calls, or reads something that has changed"
)
_CHANGED = (
    "{} changed between the forward pass and the optimizer's call: the gradient belongs to other "
    "values (gathered too late, or updated in the backward pass)"
)
_DIRECT = (
    "the loss takes parameters by itself, past the model's outputs, and ranks hold parts of them"
)
_NOT_WHOLE = (
    "the forward pass returns something else with whole parameters than it has in the training {}: "
    "dropout draws other numbers on a part, something was divided by hand, or it does not repeat "
    "itself"
)

Gradients = Sequence[Tensor | None]


class MicroBatch:
    """One forward pass of a training, and the gradients of its outputs."""

    def __init__(
        self,
        module: nn.Module,  # the model itself, not its data-parallel wrapper
        device: torch.device,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        inner: bool = False,  # compare logits as well: the loss alone may hide differences
        part: str = "",  # name of the part of the model that is called; empty for the model
    ) -> None:
        self._inner = inner
        self._part = part
        whole = module.get_submodule(part)
        inputs = [tensor for tensor in tensors_in([args, kwargs]) if tensor.requires_grad]
        self.entries: list[Edge] = [(t.grad_fn, t.output_nr) for t in inputs if t.grad_fn]
        """Where the inputs lie in the training's graph, as far as they have one."""
        self._batch = capture_batch(args, kwargs, most_bytes=MOST_BATCH_BYTES, objects=True)
        self._generators = generators_of(whole, device)
        self.autocast = Autocast.in_force(device)
        self._buffers = {
            name: (buffer, buffer._version, local_of(buffer.detach()).clone())
            for name, buffer in whole.named_buffers()
            if buffer.layout is torch.strided and buffer.nbytes <= AT_ONCE_BYTES
        }
        self._device = device
        self._parameters = [(p, digest_tensor(p)) for p in whole.parameters()]
        self._returned: list[_Returned] = []
        self._hidden = ""  # the class of an object in the outputs that has tensors out of sight
        self._num_tensors = 0
        self.root: Tensor | float | None = None
        """What its backward pass was called on; NaN if that was more than one, None before it."""
        self.tape: LossTape | None = None
        """What the script computes from its outputs; None if nothing was recorded."""
        self.joins: MicroBatch | None = None
        """The first of the same backward pass, where both are calls of parts; None of others."""
        self.direct: Mapping[str, Tensor] = {}
        """Gradients of its backward pass past the model's outputs, by the parameter's name."""
        self.attached: AttachedLosses | None = None
        """Losses that its forward pass attached; None before it."""

    @property
    def edges(self) -> list[Edge]:
        """Where the outputs lie in the training's graph."""
        return [one.edge for one in self._returned]

    @property
    def reached(self) -> set[int]:
        """The ids of the parameters that its forward pass may use."""
        return {id(parameter) for parameter, _ in self._parameters}

    @property
    def trained(self) -> bool:
        """Whether some output has got a gradient."""
        return any(one.arrived for one in self._returned)

    @property
    def num_spread(self) -> int:
        """The number of the outputs' gradients that are spread over ranks."""
        gradients = [one.gradient for one in self._returned if one.gradient is not None]
        return sum(layout_of(gradient) is not None for gradient in gradients)

    @property
    def returns_loss(self) -> bool:
        """Whether the backward pass began at numbers that the model has returned."""
        return all(one.number is not None for one in self._losses)

    @property
    def loss_scale(self) -> float:
        """The factor between the loss and what backward was called on; waits for the device.

        1 where the model does not return its loss.
        """
        if not self.returns_loss:
            return 1.0
        return max((_float(one.gradient) for one in self._losses), key=abs)

    @property
    def rounds_in(self) -> float:
        """Epsilon of the coarsest type of the outputs and the autocast."""
        kinds = [self.computed_in, *(one.dtype for one in self._returned)]
        return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)

    @property
    def _losses(self) -> "list[_Returned]":
        return [one for one in self._returned if one.gradient is not None]

    def loss_again(self, module: nn.Module, mode: AbstractContextManager[Any]) -> "LossAgain":
        """Run the forward pass once more; return what backward was called on, up to a constant.

        That is the sum of the outputs' products with their gradients: a loss that is computed
        outside of the model stays linear in what the model returns. The forward pass runs in
        ``mode``. The caller provides the context, and puts all changed state back.
        """
        args, kwargs = restore_batch(self._batch.plain(), self._device)
        self._generators.put_back()
        part = module.get_submodule(self._part)
        self._fill_buffers(part)
        with mode:
            tensors = tensors_in(_called_again(part, args, kwargs))
        pairs = [(tensors[one.place], one) for one in self._losses if one.place < len(tensors)]
        if len(tensors) != self._num_tensors or any(t.shape != one.shape for t, one in pairs):
            raise CanaryDeclined(_OTHER_TENSORS)
        total = size = far = 0.0
        for tensor, one in pairs:
            assert one.gradient is not None
            whole = whole_of(tensor.detach())
            added, terms = _sums_of_products(whole_of(one.gradient), whole)
            total, size, far = total + added, size + terms, max(far, one.distance(whole))
        return LossAgain(total, size, far)

    def check_kept(self) -> None:
        """Check that the gradients of the outputs are known; raises CanaryDeclined if not."""
        if self._hidden:
            raise CanaryDeclined(
                f"the model returns a value of type {self._hidden}, whose tensors are not seen"
            )
        lost = next((one.lost for one in self._returned if one.lost), "")
        if lost:
            raise CanaryDeclined(LOST.format(lost))

    @property
    def computed_in(self) -> torch.dtype:
        """The type of its autocast; float32 without one."""
        return self.autocast.dtype if self.autocast.enabled else torch.float32

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the outputs' gradients that are spread over ranks; all ranks call it."""
        for one in self._returned:
            if one.gradient is not None:
                one.part = local_of(one.gradient)
                one.gradient = whole_of(one.gradient)

    @property
    def arrived(self) -> list[Tensor | None]:
        """This rank's parts of the gradients of the outputs, in the order of :meth:`see_output`."""
        gradients = (one.gradient if one.part is None else one.part for one in self._returned)
        return [None if gradient is None else local_of(gradient) for gradient in gradients]

    @torch.no_grad()
    def see_output(self, output: object) -> list[Tensor]:
        """Note the outputs of the forward pass, and hook their gradients.

        Returns those of which a script may compute a loss; none where one comes from another.
        """
        self._hidden = hides_tensors(output)
        tensors = _differentiable(output)
        above = _computed_from(tensors)
        self._returned = [
            _Returned(tensor, compared=self._inner or not numbers)
            for tensor, numbers in zip(tensors, above, strict=True)
        ]
        everything = tensors_in(output)
        self._num_tensors = len(everything)
        places = {id(tensor): place for place, tensor in enumerate(everything)}
        for one, tensor in zip(self._returned, tensors, strict=True):
            one.place = places[id(tensor)]
        for one, numbers in zip(self._returned, above, strict=True):
            one.above = [self._returned[number] for number in numbers]
        for one, tensor in zip(self._returned, tensors, strict=True):
            hook_gradient(tensor, one.receive)
        self.attached = AttachedLosses(self.edges, self.entries)
        is_loss = any(above) or all(tensor.numel() == 1 for tensor in tensors)
        return [] if is_loss else tensors

    def gradients(
        self,
        module: nn.Module,  # the model, or a plain copy, with the parameters of the forward pass
        parameters: Sequence[Tensor],
        *,
        rounds_in: torch.dtype | None = None,
        compared: bool = True,  # the outputs have to be those of the training
    ) -> Gradients:
        """Compute the gradients of the training's loss once more."""
        self.check_kept()
        changed = [p for p in self.changed(module) if p.requires_grad]
        if changed:
            raise CanaryDeclined(_CHANGED.format(_names(module, changed)))
        args, kwargs = restore_batch(self._batch.plain(), self._device)
        with (
            preserved_state(module, self._device, seed=None) as run,
            alone(self._device, run, self.autocast),
        ):
            self._generators.put_back()
            part = module.get_submodule(self._part)
            self._fill_buffers(part)
            tensors = _differentiable(_called_again(part, args, kwargs))
            try:
                self._compare(tensors, rounds_in, values=compared)
            except CanaryDeclined as reason:
                changed = self.changed(module)
                if not changed:
                    raise
                why = f"{reason}; {_names(module, changed)} changed after the forward pass began"
                raise CanaryDeclined(why) from reason
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

    def with_direct(
        self, names: Sequence[str], parameters: Sequence[Tensor], found: Gradients
    ) -> Gradients:
        """Return gradients that came through the outputs, with those that came past them."""
        whole = list(found)
        for place, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            own = self.direct.get(name)
            through = whole[place]
            if own is None:
                continue
            if layout_of(own) is not None or own.shape != parameter.shape:
                raise CanaryDeclined(_DIRECT)
            whole[place] = own if through is None else through + own
        return whole

    def changed(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters that differ from those of the forward pass; waits for the device.

        Sharded ones do not count: the forward pass has others than the module has now.
        """
        kept = {id(parameter): digest for parameter, digest in self._parameters}
        return [
            parameter
            for parameter in module.parameters()
            if id(parameter) in kept and int(digest_tensor(parameter)) != int(kept[id(parameter)])
        ]

    @torch.no_grad()
    def _fill_buffers(self, module: nn.Module) -> None:
        """Give small buffers their content in the training, unless it is unchanged."""
        for name, buffer in module.named_buffers():
            if name in self._buffers:
                original, version, before = self._buffers[name]
                if buffer is not original or buffer._version != version:
                    buffer.copy_(before)

    def _used(self, tensors: Sequence[Tensor]) -> "tuple[_Pairs, _Pairs]":
        """Return the outputs at which the backward pass starts, and those that it passes."""
        pairs = list(zip(tensors, self._returned, strict=True))
        tops = [(tensor, one) for tensor, one in pairs if one.gradient is not None]
        return tops, [(tensor, one) for tensor, one in pairs if one.norm is not None]

    @torch.no_grad()
    def _compare(
        self, tensors: Sequence[Tensor], rounds_in: torch.dtype | None, *, values: bool
    ) -> None:
        """Check that the outputs are those of the training."""
        if [tensor.shape for tensor in tensors] != [one.shape for one in self._returned]:
            raise CanaryDeclined(_OTHER_TENSORS)
        coarsest = coarser(self.computed_in, rounds_in or torch.float32)
        slack = _SLACK if rounds_in is not None else 1.0
        for tensor, one in zip(tensors, self._returned, strict=True) if values else ():
            eps = torch.finfo(coarser(tensor.dtype, coarsest)).eps
            far = one.distance(tensor)
            if math.isnan(far):
                raise CanaryDeclined("the outputs of the forward pass are not finite")
            if far > slack * (_EXACT if eps < 1e-6 else _COARSE * eps):
                why = _NOT_WHOLE if rounds_in is not None else _NOT_REPEATED
                raise CanaryDeclined(why.format(f"(relative difference {far:.1e})"))


class LossAgain(NamedTuple):
    """What one more run of a micro-batch's forward pass returned."""

    total: float  # what backward was called on, up to a constant
    size: float  # sum of the absolute terms, which bounds its rounding
    far: float  # largest relative distance of an output from the training's


class _Returned:
    """An output of the training's forward pass."""

    def __init__(self, tensor: Tensor, *, compared: bool) -> None:
        self.shape = tensor.shape
        self.layout = layout_of(tensor)  # how ranks share it; None of a plain tensor
        local = local_of(tensor)
        self.projection = project(local) if compared else None
        self.spread = _norm(local) / max(local.numel(), 1) ** 0.5
        self.dtype = tensor.dtype
        self.edge: Edge = (tensor.grad_fn, tensor.output_nr)
        self.place = 0  # its place among all tensors of the output
        # its value, if it is one number
        self.number = local.detach().clone() if local.numel() == 1 else None
        self.above: list[_Returned] = []  # computed from it, such as the loss from logits
        self.gradient: Tensor | None = None  # its gradient, if that does not pass through those
        self.part: Tensor | None = None  # of that gradient, what this rank holds, once gathered
        self.norm: Tensor | None = None  # of this rank's part, if it may pass through those
        self._inner: Layout | None = None
        self.lost = ""  # error at the arrival of the gradient; empty without
        self.arrived = False  # it has got a gradient
        self.backward = Autocast.in_force(tensor.device)  # autocast of the backward pass

    def distance(self, tensor: Tensor) -> float:
        """Return the relative distance of an output of another run; 0 where none is compared."""
        if self.projection is None or (self.above and not self.projection.isfinite()):
            return 0.0
        far = float((project(part_in(self.layout, tensor)) - self.projection).abs())
        return far / max(float(self.projection.abs() + self.spread), _TINY)

    def receive(self, gradient: Tensor | None) -> None:
        """Store a gradient from a backward pass; never raises into it.

        None, as DDP's own node passes on for an output that the loss leaves alone, is no gradient.
        """
        if gradient is None:
            return
        try:
            outside(self._receive, gradient)
        except Exception as error:
            self.lost = in_short(error)

    def _receive(self, gradient: Tensor) -> None:
        self.arrived = True
        self.backward = Autocast.in_force(gradient.device)
        with torch.no_grad():
            if any(one.arrived for one in self.above):
                self.norm = _norm(local_of(gradient))
                self._inner = layout_of(gradient)
            elif self.gradient is None:
                self.gradient = gradient.detach().clone()
            else:
                self.gradient = self.gradient + gradient

    def check_inside(self, inside: Tensor | None) -> None:
        """Check that the whole gradient came through the outputs computed from this one."""
        norm = 0.0 if inside is None else float(_norm(part_in(self._inner, inside)))
        seen = float(self.norm) if self.norm is not None else 0.0
        if not abs(norm - seen) <= 0.01 * seen:
            raise CanaryDeclined(
                "the loss takes what the model returns from several places, one of which was "
                "computed from another, and what came back to each by itself is not known"
            )


_Pairs = list[tuple[Tensor, _Returned]]


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the one of two floating-point types that rounds more."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _called_again(part: nn.Module, args: Any, kwargs: Any) -> object:
    """Return what the forward pass returns; raises CanaryDeclined where it fails."""
    try:
        return part(*args, **kwargs)
    except Exception as error:
        if isinstance(error, CanaryDeclined) or is_out_of_memory(error):
            raise
        raise CanaryDeclined(_FAILS.format(type(error).__name__)) from error


def _names(module: nn.Module, parameters: Sequence[Tensor]) -> str:
    found = {id(parameter) for parameter in parameters}
    named = [canonical_name(n) for n, p in module.named_parameters() if id(p) in found]
    return shortened(named, _MOST_NAMED)


def _float(number: Tensor | None) -> float:
    """Return a number that a rank holds; waits for the device."""
    assert number is not None
    return float(local_of(number.detach()))


def _sums_of_products(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the sum of the products of elements and of their absolute values, a part at once."""
    total = torch.zeros(2, dtype=torch.float64, device=one.device)
    one, other = one.reshape(-1), other.reshape(-1)
    for start in range(0, len(one), _ELEMENTS):
        products = one[start : start + _ELEMENTS].double() * other[start : start + _ELEMENTS]
        total += torch.stack([products.sum(), products.abs().sum()])
    found: list[float] = total.tolist()
    return found[0], found[1]


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, without a copy in another type."""
    kind = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=kind)
    return norm


def _differentiable(output: object) -> list[Tensor]:
    """Return the tensors of an output that have a graph, each once, in order."""
    found = {id(tensor): tensor for tensor in tensors_in(output) if tensor.grad_fn is not None}
    return list(found.values())


def _computed_from(tensors: Sequence[Tensor]) -> list[set[int]]:
    """Return for each tensor the numbers of those that were computed from it."""
    places: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        places.setdefault((tensor.grad_fn, tensor.output_nr), []).append(number)
    above: list[set[int]] = [set() for _ in tensors]
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
                    above[other].add(number)
    return above
