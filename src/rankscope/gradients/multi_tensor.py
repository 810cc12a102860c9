"""Measures several gradients in one call, step after step."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.errors import UnsupportedError
from rankscope.gradients.kernels import Kernel, ParameterSigns
from rankscope.gradients.kernels.flat import check_memory, flat_parts
from rankscope.gradients.kernels.interface import Piece
from rankscope.gradients.totals import GradientTotals

_FLAT_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LOW = 1 << 40
"""Lower addresses lie in freed memory: they count from zero."""

_look_on_host = attrgetter("dtype", "layout", "is_cpu")
_look_on_device = attrgetter("dtype", "layout", "device")


class Cut(NamedTuple):
    """Consecutive elements of a part of a gradient, and where they belong.

    Attributes:
        row: Of the totals.
        low: Position of the first of them in the part.
        high: Position behind the last of them.
        start: Position of the first of them in the whole flat parameter, as a kernel counts.
    """

    row: int
    low: int
    high: int
    start: int


class TensorSource(NamedTuple):
    """Where the elements of one gradient belong.

    Attributes:
        cuts: Cuts a part of it, given the position of its first element and their number.
        signs: The parameter's signs; None where norms alone are measured.
    """

    cuts: Callable[[int, int], Iterable[Cut]]
    signs: ParameterSigns | None


class MultiTensorReader:
    """Measures gradients of which nothing but their memory changes from call to call.

    Those in the layout of the kernel are prepared for it, and measured in one call; all others one
    by one.

    Args:
        kernel: Measures the gradients.
        device: The device of the kernel.
        gradients: Gradients like those that will be measured.
        sources: Where the elements of each belong.
        sketching: Whether to sketch, or to measure norms alone.

    Raises:
        UnsupportedError: A gradient lives elsewhere.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: torch.device,
        gradients: Sequence[Tensor],
        sources: Sequence[TensorSource],
        *,
        sketching: bool,
    ) -> None:
        self._kernel = kernel
        self._sources = sources
        self._look = _look_on_host if device.type == "cpu" else _look_on_device
        self._form = self._form_of(gradients)
        for gradient in gradients:
            _check_device(gradient, device)
        flat = [number for number, gradient in enumerate(gradients) if _is_flat(gradient)]
        self._flat = flat
        self._others = sorted(set(range(len(gradients))) - set(flat))
        pieces = [
            Piece(source, cut.low, cut.high - cut.low, gradients[number].dtype, cut.row,
                  sources[number].signs, cut.start)
            for source, number in enumerate(flat)
            for cut in sources[number].cuts(0, gradients[number].numel())
        ]  # fmt: skip
        self._prepared = kernel.prepare(pieces, sketching=sketching) if pieces else None

    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether gradients are like those that were prepared."""
        return self._form_of(gradients) == self._form

    def measure(self, gradients: Sequence[Tensor], into: GradientTotals) -> None:
        """Add gradients that fit to totals.

        Raises:
            UnsupportedError: The training has freed the memory of one.
        """
        flat = [gradients[number] for number in self._flat] if self._others else gradients
        pointers = list(map(Tensor.data_ptr, flat))
        if pointers and min(pointers) < _LOW:
            for gradient, pointer in zip(flat, pointers, strict=True):
                if pointer < _LOW:
                    check_memory(gradient)
        if self._prepared is not None:
            self._prepared.measure(flat, pointers, into)
        for number in self._others:
            self._measure_alone(gradients[number], self._sources[number], into)

    @torch.no_grad()
    def _measure_alone(self, gradient: Tensor, source: TensorSource, into: GradientTotals) -> None:
        for position, flat in flat_parts(gradient):
            for row, low, high, start in source.cuts(position, len(flat)):
                self._kernel.measure(flat[low:high], source.signs, start, into, row)

    def _form_of(self, gradients: Sequence[Tensor]) -> list[object]:
        """Return the properties that must not change; read in each step, and so without a loop."""
        kinds = set(map(type, gradients))
        if kinds != {Tensor}:  # other types may override any method
            return [_look_closely(gradient) for gradient in gradients]
        return [
            list(map(self._look, gradients)),
            list(map(Tensor.numel, gradients)),
            list(map(Tensor.is_contiguous, gradients)),
        ]


def _look_closely(gradient: Tensor) -> object:
    if type(gradient) is not Tensor:
        return type(gradient)  # measured alone in any case
    contiguous = gradient.is_contiguous()
    return gradient.dtype, gradient.layout, gradient.device, gradient.numel(), contiguous


def _is_flat(gradient: Tensor) -> bool:
    """Return whether its elements lie in memory one behind the other, in a known type."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.dtype in _FLAT_TYPES
        and gradient.is_contiguous()
    )


def _check_device(gradient: Tensor, device: torch.device) -> None:
    if gradient.device != device:
        raise UnsupportedError(
            f"expected a gradient on {device}, where this worker's others are, got one on "
            f"{gradient.device}; a model that is split over devices cannot be watched yet"
        )
