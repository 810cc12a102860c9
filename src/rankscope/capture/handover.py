"""A measured gradient on its way from the device to the host."""

import functools
import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.agent.message import StepMessage
from rankscope.capture.fold import fold_native, fold_plain
from rankscope.capture.folding import Folding
from rankscope.capture.host import HostCopy, Share
from rankscope.capture.kernels.build import BuildError
from rankscope.capture.kernels.native import load_functions
from rankscope.capture.tap import LocalGradient
from rankscope.core.arrays import Floats, Floats32
from rankscope.core.measured import NUMBERS, sizes_of
from rankscope.core.sections import Sections

_log = logging.getLogger("rankscope")


class GradientHandover:
    """Starts the copy of what was measured; two vectors, small whatever the model's size.

    On the CPU they are there at once. On an accelerator with a kernel of its own, it takes one
    launch, besides one for each of what is known of some steps alone: norms of micro-batches,
    whether something was carried over, the product with the reduced gradient. They are copied with
    all else that the step measures there.

    Args:
        measured: The gradient's totals, on their device.
        sketch_width: Numbers to send of the total's sketch, at most its width; or 0.
        group_width: Numbers to send of each group's sketch.
        sections: The rows of the totals, where the reduction is audited; None: one per group.
        audit_width: Numbers in each section's sketch for the audit; 0 without.
        gram: This worker's part of the exact inner products ``[W(W+1)/2]``, in the exact tier.
    """

    def __init__(
        self,
        measured: LocalGradient,
        *,
        sketch_width: int,
        group_width: int,
        sections: Sections | None = None,
        audit_width: int = 0,
        gram: Tensor | None = None,
    ) -> None:
        num_rows, wide = measured.totals.sketches.shape
        counts = (1,) * num_rows if sections is None else sections.counts
        reduced = measured.reduced is not None
        folding = Folding(counts, wide, sketch_width, group_width, audit_width, reduced)
        self._norm_estimated = measured.norm_estimated
        self._sketch_lengths = folding.lengths
        self._number_lengths = _number_lengths(measured)
        self._copies: list[HostCopy | Share] = []
        self._arrays: tuple[Floats, Floats32] | None = None
        if measured.totals.sketches.is_cpu and _is_compiled():
            sketches = fold_native(measured.totals, measured.reduced, folding)
            self._arrays = _numbers_on_host(measured), sketches
        else:
            self._copies = _copies(measured, folding)
        self._gram = None if gram is None else HostCopy(gram)

    @property
    def ready(self) -> bool:
        """Whether everything is on the host."""
        on_their_way = [*self._copies, *(() if self._gram is None else (self._gram,))]
        return all(copy.ready for copy in on_their_way)

    def fill(self, message: StepMessage) -> None:
        """Wait for the copy, and put it into a message."""
        message.numbers, message.sketches = self._read()
        sizes = sizes_of(
            self._number_lengths, self._sketch_lengths, norm_estimated=self._norm_estimated
        )
        message.sizes = np.array(sizes, np.int64)
        if self._gram is not None:
            message.gram = np.asarray(self._gram.numpy(), np.float64)

    def _read(self) -> tuple[Floats, Floats32]:
        if self._arrays is not None:
            return self._arrays
        whole, *more = (copy.numpy() for copy in self._copies)
        if more:
            return np.asarray(whole, np.float64), np.asarray(more[0], np.float32)
        num_numbers = sum(self._number_lengths.values())
        num_floats = sum(self._sketch_lengths.values())
        numbers: NDArray[np.float64] = whole.view(np.float64)
        return numbers[:num_numbers], numbers[num_numbers:].view(np.float32)[:num_floats]


def _copies(measured: LocalGradient, folding: Folding) -> list[HostCopy | Share]:
    """Start the copies from a device: of numbers and sketches together, or of each."""
    if _Launching.possible and _launches_on(measured.totals.sketches):
        try:
            share = Share(measured.totals.sketches.device)
            launch(measured, folding, share.take)
            return [share]
        except Exception as error:  # whatever it is, training goes on, a little slower
            _Launching.possible = False
            reason = str(error).strip().split("\n")[0]
            _log.info("what is measured is gathered in plain torch: %s", reason)
    numbers = torch.cat(list(_numbers(measured).values()))
    sketches = fold_plain(measured.totals, measured.reduced, folding)
    return [HostCopy(numbers, own=True), HostCopy(sketches, own=True)]


def _launches_on(tensor: Tensor) -> bool:
    """Return whether there is a kernel for a tensor's device."""
    return tensor.is_cuda and torch.version.hip is None


class _Launching:
    """Whether the kernel is known to work, or not known to fail."""

    possible = True


def launch(
    measured: LocalGradient, folding: Folding, take: Callable[[int], Tensor] | None = None
) -> Tensor:
    """Gather numbers and sketches with one launch.

    Args:
        measured: The gradient.
        folding: Which sketches are wanted.
        take: Returns so many words of 64 bits on the device; None for new ones.

    Returns:
        float64 ``[n]``: the numbers, and behind them the float32 sketches.
    """
    from rankscope.capture.kernels.fused_handover import hand_over

    given = _given(measured)
    if measured.micro_squared_norms is not None:
        given["micro"] = measured.micro_squared_norms
    take = measured.totals.squared_norms.new_empty if take is None else take
    return hand_over(measured.totals, measured.reduced, folding, given, take)


@functools.cache
def _is_compiled() -> bool:
    try:
        load_functions()
    except BuildError:
        return False
    return True


def _number_lengths(measured: LocalGradient) -> dict[str, int]:
    """Return how many numbers each part has, by its name in ``NUMBERS``."""
    num_rows, micro = len(measured.totals.squared_norms), measured.micro_squared_norms
    lengths = {
        "squares": num_rows,
        "reduced_squares": 0 if measured.reduced is None else num_rows,
        "micro": 0 if micro is None else len(micro),
        "largest": 1,
        "nonfinite": 1,
        "carried": int(measured.carried_over is not None),
        "product": int(measured.reduced_product is not None),
    }
    return {name: lengths[name] for name in NUMBERS}


def _given(measured: LocalGradient) -> dict[str, Tensor]:
    """Return what is known of some steps alone, as float64 ``[1]`` each."""
    given = {}
    if measured.carried_over is not None:
        given["carried"] = measured.carried_over.reshape(1).double()
    if measured.reduced_product is not None:
        given["product"] = measured.reduced_product.reshape(1)
    return given


def _numbers(measured: LocalGradient) -> dict[str, Tensor]:
    """Return what is known, in float64, in the order of ``NUMBERS``."""
    totals = measured.totals
    numbers = {
        "squares": totals.squared_norms,
        "largest": totals.largest.amax(0, keepdim=True).double(),
        "nonfinite": totals.nonfinite.sum(0, keepdim=True).double(),
        **_given(measured),
    }
    if measured.reduced is not None:
        numbers["reduced_squares"] = measured.reduced.squared_norms
    if measured.micro_squared_norms is not None:
        numbers["micro"] = measured.micro_squared_norms
    return {name: numbers[name] for name in NUMBERS if name in numbers}


def _numbers_on_host(measured: LocalGradient) -> Floats:
    """Return the same where everything is on the host."""
    totals = measured.totals
    numbers: dict[str, NDArray[np.float64]] = {
        "squares": totals.squared_norms.numpy(),
        "largest": np.array([totals.largest.numpy().max()], np.float64),
        "nonfinite": np.array([totals.nonfinite.numpy().sum()], np.float64),
        **{name: tensor.numpy() for name, tensor in _given(measured).items()},
    }
    if measured.reduced is not None:
        numbers["reduced_squares"] = measured.reduced.squared_norms.numpy()
    if measured.micro_squared_norms is not None:
        numbers["micro"] = measured.micro_squared_norms.numpy()
    return np.concatenate([numbers[name] for name in NUMBERS if name in numbers])
