"""The kernels that read a gradient once, behind one interface.

All yield the same numbers within rounding: squared norm, sketch, largest magnitude and the count
of non-finite values. :func:`choose_kernel` picks the fastest one that works on a device.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rankscope.gradients.kernels.interface import Kernel, ParameterSigns, Piece, Prepared
from rankscope.gradients.kernels.launch import log_fallback
from rankscope.gradients.kernels.native import NativeKernel
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals

_WHAT = "gradients are measured"


def choose_kernel(device: torch.device, width: int, period: Tensor) -> Kernel:
    """Return the fastest kernel that works on a device.

    On CUDA that is the Triton kernel, on the CPU the native one if the package has it, and
    otherwise, and everywhere else, plain torch. A faster kernel that is missing, or whose numbers
    differ from plain torch's, is passed over with one line in the log.
    """
    plain = PlainKernel(device, width, period)
    try:
        kernel = _fast_kernel(device, width, period)
        if kernel is None:
            return plain
        check_kernel(kernel, plain, device, width)
    except Exception as error:  # whatever it is, training goes on, a little slower
        log_fallback(_WHAT, error, logging.DEBUG if device.type == "cpu" else logging.INFO)
        return plain
    return kernel if device.type == "cpu" else SafeKernel(kernel, plain)


class SafeKernel(Kernel):
    """A kernel that compiles itself anew for other sizes, and plain torch for when that fails.

    The kernel leaves the totals alone when it raises. Plain torch takes over for good at the first
    failure, with one line in the log.
    """

    def __init__(self, kernel: Kernel, plain: Kernel) -> None:
        self._kernel: Kernel | None = kernel
        self._plain = plain
        self.name = kernel.name

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure several gradients at once."""
        if self._kernel is None:
            return self._plain.prepare(pieces, sketching=sketching)
        replace = partial(self._replace, pieces, sketching)
        try:
            return _SafePieces(self._kernel.prepare(pieces, sketching=sketching), replace)
        except Exception as error:
            return replace(error)

    def _replace(self, pieces: Sequence[Piece], sketching: bool, error: Exception) -> Prepared:
        if self._kernel is not None:
            self._kernel = None
            self.name = self._plain.name
            log_fallback(_WHAT, error, logging.INFO)
        return self._plain.prepare(pieces, sketching=sketching)


class _SafePieces:
    """Pieces that a kernel has prepared, until it raises, which leaves the totals alone."""

    def __init__(self, prepared: Prepared, replace: Callable[[Exception], Prepared]) -> None:
        self._prepared = prepared
        self._replace = replace

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals."""
        try:
            self._prepared.measure(gradients, pointers, into)
        except Exception as error:
            self._prepared = self._replace(error)
            self._prepared.measure(gradients, pointers, into)


def _fast_kernel(device: torch.device, width: int, period: Tensor) -> Kernel | None:
    if device.type == "cpu":
        return NativeKernel(width, period)
    if device.type == "cuda" and torch.version.hip is None:
        from rankscope.gradients.kernels.fused import TritonKernel

        return TritonKernel(device, width, period)
    return None


def check_kernel(kernel: Kernel, plain: Kernel, device: torch.device, width: int) -> None:
    """Raise an ArithmeticError where a kernel and plain torch differ by more than rounding.

    A few rows of each dtype are tried.
    """
    signs = ParameterSigns("", 0, device)
    waves = torch.arange(9 * width + 31, device=device, dtype=torch.float32).mul_(0.7).sin_()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        healthy = waves.to(dtype)
        broken = healthy.clone()
        broken[width] = torch.nan
        broken[-1] = torch.inf
        for gradient in (healthy, broken):
            expected, totals = (GradientTotals.zeros(2, width, device) for _ in range(2))
            for each, into in ((plain, expected), (kernel, totals)):
                each.measure(gradient, signs, 17, into, 1)
                each.measure(gradient, None, 0, into, 0)
            if not _agree(totals, expected):
                raise ArithmeticError(f"the {kernel.name} kernel errs on {dtype}")


def _agree(totals: GradientTotals, expected: GradientTotals) -> bool:
    return (
        torch.allclose(totals.sketches, expected.sketches, rtol=1e-4, atol=1e-4, equal_nan=True)
        and torch.allclose(totals.squared_norms, expected.squared_norms, rtol=2e-6, equal_nan=True)
        and torch.allclose(totals.largest, expected.largest, rtol=0, equal_nan=True)
        and torch.equal(totals.nonfinite, expected.nonfinite)
    )
