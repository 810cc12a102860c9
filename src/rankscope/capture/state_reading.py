"""Reads what is compared between workers: gradients, and whatever an optimizer keeps."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.capture.digest import PendingDigest, digest_bits, flat_pieces, word_of
from rankscope.capture.kernels import PERIOD, Kernel, choose_kernel
from rankscope.capture.kernels.bits import native_sum
from rankscope.capture.kernels.flat import check_memory
from rankscope.capture.kernels.native import NativeKernel, reads
from rankscope.capture.state_plan import Slice
from rankscope.capture.totals import GradientTotals

_WIDTH = 251  # of a sketch that is never made
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest_optimizer(optimizer: object, parameter: Tensor, part: Slice) -> PendingDigest:
    """Return a digest of all that an optimizer keeps for a parameter; 0 if it keeps nothing.

    Of state that is cut with its parameter, the same share counts, elements of the same places
    where the shapes are equal.
    """
    states = getattr(optimizer, "state", None)
    state = states.get(parameter) if isinstance(states, Mapping) else None
    return PendingDigest() if state is None else _digest(state, part)


def _digest(state: object, part: Slice) -> PendingDigest:
    if isinstance(state, Tensor):
        return digest_bits(state, *_share(state, part))
    pairs: Iterable[tuple[object, object]]
    if isinstance(state, Mapping):
        pairs = state.items()
    elif isinstance(state, (list, tuple)):
        pairs = enumerate(state)
    else:
        known = f"{type(state).__name__} {state!r}" if isinstance(state, _PLAIN) else type(state)
        return PendingDigest(word_of(f"value {known}"))
    digest = PendingDigest(_word_of_length(len(state)))
    for key, value in pairs:  # in any order: they are added up
        digest.add(_digest(value, part), _weight_of(str(key)))
    return digest


@lru_cache(maxsize=4096)
def _word_of_length(length: int) -> int:
    return word_of(f"{length} values")


@lru_cache(maxsize=4096)
def _weight_of(key: str) -> int:
    return word_of(f"key {key}") | 1


def _share(state: Tensor, part: Slice) -> tuple[int, int | None]:
    """Return the range of a state tensor that belongs to a range of its parameter."""
    if part.start == 0 and part.stop is None:
        return 0, None
    length = (state.to_local() if isinstance(state, DTensor) else state).numel()
    if length < 2:
        return 0, None
    stop = None if part.stop is None else part.stop * length // part.length
    return part.start * length // part.length, stop


class GradientNorms:
    """Squared norms of parts of gradients, added up separately at several moments of a step.

    Args:
        moments: How many moments there are.
    """

    def __init__(self, moments: int) -> None:
        self._moments = moments
        self._totals: GradientTotals | None = None  # of what lies on the host
        self._more: list[list[float | Tensor]] = [[] for _ in range(moments)]
        self._at_once: list[tuple[Tensor, int]] = []  # with moments; what the native kernel reads

    def begin(self, moment: int) -> None:
        """Forget what was added at a moment."""
        self._more[moment].clear()
        self._at_once.clear()
        if self._totals is not None:
            self._totals.squared_norms[moment] = 0.0

    def add(self, moment: int, gradient: Tensor, part: Slice) -> None:
        """Add a part of a gradient; of a sparse one, all its values. Nothing waits for it.

        Of some gradients, all at a moment are read together in :meth:`end`.
        """
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        gradient = gradient.detach() if gradient.requires_grad else gradient
        start, stop = part.start, part.stop
        if gradient.layout != torch.strided:
            gradient = gradient._values() if gradient.is_sparse else gradient.values()
            start, stop = 0, None
        length = gradient.numel()
        stop = length if stop is None else min(stop, length)
        if start >= stop:
            return
        if gradient.is_cpu:
            self._add_on_host(moment, gradient, start, stop)
            return
        for flat in _real_pieces(gradient, start, stop):
            dtype = torch.promote_types(flat.dtype, torch.float32)
            norm = torch.linalg.vector_norm(flat, dtype=dtype)
            self._more[moment].append(norm.double().square())

    def end(self, moment: int) -> None:
        """Finish what was begun at a moment."""
        if self._at_once and self._totals is not None:
            kernel, at_once = _kernel(), self._at_once
            self._at_once = []
            assert isinstance(kernel, NativeKernel)
            kernel.measure_norms(at_once, self._totals)

    def _add_on_host(self, moment: int, gradient: Tensor, start: int, stop: int) -> None:
        if self._totals is None:
            self._totals = GradientTotals.zeros(self._moments, 1, gradient.device)
        kernel = _kernel()
        if isinstance(kernel, NativeKernel) and reads(gradient):
            if stop - start < gradient.numel():
                gradient = gradient.view(-1)[start:stop]
            self._at_once.append((gradient, moment))
            return
        check_memory(gradient)
        self.end(moment)  # in order: sums of floats depend on it
        for flat in _real_pieces(gradient, start, stop):
            kernel.measure_norm(flat, self._totals, moment)

    def spoil(self, moment: int) -> None:
        """Say that something is missing at a moment: its norm is unknown."""
        self._more[moment].append(math.nan)

    def take(self) -> list[list[float | Tensor]]:
        """Return what is to be added up for each moment, and begin all anew.

        Returns:
            Numbers, and float64 tensors ``[]`` that may still be computed on a device.
        """
        taken, self._more = self._more, [[] for _ in range(self._moments)]
        if self._totals is not None:
            for numbers, total in zip(taken, self._totals.squared_norms.tolist(), strict=True):
                numbers.append(total)
            self._totals.squared_norms.zero_()
        return taken


def _real_pieces(gradient: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    for piece in flat_pieces(gradient, start, stop):
        yield torch.view_as_real(piece).view(-1) if piece.is_complex() else piece


def prepare() -> None:
    """Compile now what reads on the host; later, a backward pass would have to wait for it."""
    native_sum()
    _kernel()


@cache
def _kernel() -> Kernel:
    cpu = torch.device("cpu")
    with torch.inference_mode(False):
        period = torch.ones(PERIOD, device=cpu, dtype=torch.float32)
        return choose_kernel(cpu, _WIDTH, period)
