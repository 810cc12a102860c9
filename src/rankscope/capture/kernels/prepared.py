"""What a kernel needs to know of several gradients that are measured together, step after step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rankscope.capture.kernels.signs import ParameterSigns
from rankscope.capture.totals import GradientTotals


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a gradient, all of which count to one row of the totals.

    Attributes:
        source: Which of the gradients.
        offset: Position of the piece's first element in it.
        count: Number of elements, at least one.
        dtype: Of the gradient: float32, bfloat16 or float16.
        row: Of the totals.
        signs: The parameter's signs; None where norms alone are measured.
        start: Position of the first element in the whole flat parameter, as a kernel counts.
    """

    source: int
    offset: int
    count: int
    dtype: torch.dtype
    row: int
    signs: ParameterSigns | None
    start: int


class Prepared(Protocol):
    """Measures gradients of which nothing but their memory changes from call to call."""

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals.

        Args:
            gradients: Contiguous; as long, and of the types, that the pieces say.
            pointers: Address of each one's first element.
            into: The totals to add to.
        """
