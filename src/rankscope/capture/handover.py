"""A measured gradient on its way from the device to the host."""

import functools
import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.agent.message import StepMessage
from rankscope.capture.fold import fold_plain, native_fold
from rankscope.capture.folding import Folding
from rankscope.capture.host import HostCopy
from rankscope.capture.kernels.build import BuildError
from rankscope.capture.kernels.native import load_functions
from rankscope.capture.tap import LocalGradient
from rankscope.core.arrays import Floats, Floats32, Ints
from rankscope.core.measured import NUMBERS, sizes_of
from rankscope.core.sections import Sections

_log = logging.getLogger("rankscope")


class GradientHandover:
    """Starts the copy of what was measured; two vectors, small whatever the model's size.

    On the CPU they are there at once. On an accelerator with a kernel of its own, it takes one
    launch and one copy, besides one launch for each of what is known of some steps alone: norms of
    micro-batches, whether something was carried over, the product with the reduced gradient.

    Args:
        measured: The gradient's totals, on their device.
        sketch_width: Numbers to send of the total's sketch, at most its width; or 0.
        group_width: Numbers to send of each group's sketch. None are sent where they are as many
            as those of each section: the sketch of a group is the sum of its sections'.
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
        sent = 0 if group_width == audit_width else group_width
        self._form = _form_of(counts, wide, sketch_width, sent, audit_width, reduced)
        self._norm_estimated = measured.norm_estimated
        self._number_lengths = _number_lengths(measured)
        self._copies: list[HostCopy] = []
        self._arrays: tuple[Floats, Floats32] | None = None
        if measured.totals.sketches.is_cpu and _is_compiled():
            sketches = native_fold(self._form)(measured.totals, measured.reduced)
            self._arrays = _numbers_on_host(measured), sketches
        else:
            self._copies = _copies(measured, self._form)
        self._gram = None if gram is None else HostCopy(gram)

    @property
    def ready(self) -> bool:
        """Whether everything is on the host."""
        on_their_way = [*self._copies, *(() if self._gram is None else (self._gram,))]
        return all(copy.ready for copy in on_their_way)

    def fill(self, message: StepMessage) -> None:
        """Wait for the copy, and put it into a message."""
        message.numbers, message.sketches = self._read()
        message.sizes = _sizes(self._number_lengths, self._form, self._norm_estimated)
        if self._gram is not None:
            message.gram = np.asarray(self._gram.numpy(), np.float64)

    def _read(self) -> tuple[Floats, Floats32]:
        if self._arrays is not None:
            return self._arrays
        whole, *more = (copy.numpy() for copy in self._copies)
        if more:
            return np.asarray(whole, np.float64), np.asarray(more[0], np.float32)
        num_numbers = sum(self._number_lengths)
        num_floats = sum(self._form.lengths.values())
        numbers: NDArray[np.float64] = np.asarray(whole, np.float64)
        return numbers[:num_numbers], numbers[num_numbers:].view(np.float32)[:num_floats]


def _copies(measured: LocalGradient, folding: Folding) -> list[HostCopy]:
    """Start the copies from a device: of numbers and sketches together, or of each."""
    if _Launching.possible and _launches_on(measured.totals.sketches):
        try:
            return [HostCopy(launch(measured, folding), own=True)]
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


def launch(measured: LocalGradient, folding: Folding) -> Tensor:
    """Gather numbers and sketches with one launch.

    Returns:
        float64 ``[n]``: the numbers, and behind them the float32 sketches.
    """
    from rankscope.capture.kernels.fused_handover import hand_over

    given = _given(measured)
    if measured.micro_squared_norms is not None:
        given["micro"] = measured.micro_squared_norms
    return hand_over(measured.totals, measured.reduced, folding, given)


@functools.cache
def _is_compiled() -> bool:
    try:
        load_functions()
    except BuildError:
        return False
    return True


_form_of = functools.lru_cache(maxsize=16)(Folding)


@functools.lru_cache(maxsize=64)
def _sizes(number_lengths: tuple[int, ...], folding: Folding, norm_estimated: bool) -> Ints:
    numbers = dict(zip(NUMBERS, number_lengths, strict=True))
    return np.array(sizes_of(numbers, folding.lengths, norm_estimated=norm_estimated), np.int64)


def _number_lengths(measured: LocalGradient) -> tuple[int, ...]:
    """Return how many numbers each part of ``NUMBERS`` has."""
    num_rows, micro = len(measured.totals.squared_norms), measured.micro_squared_norms
    return (
        num_rows,
        0 if measured.reduced is None else num_rows,
        0 if micro is None else len(micro),
        1,
        1,
        int(measured.carried_over is not None),
        int(measured.reduced_product is not None),
    )


def _given(measured: LocalGradient) -> dict[str, Tensor]:
    """Return what is known of some steps alone, as float64 ``[1]`` each, as ``NUMBERS`` has it."""
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
    totals, reduced, micro = measured.totals.arrays, measured.reduced, measured.micro_squared_norms
    parts: list[Any] = [totals.squared_norms]
    if reduced is not None:
        parts.append(reduced.arrays.squared_norms)
    if micro is not None:
        parts.append(micro.numpy())
    parts.append((np.maximum.reduce(totals.largest), np.add.reduce(totals.nonfinite)))
    parts += [tensor.numpy() for tensor in _given(measured).values()]
    numbers: Floats = np.concatenate(parts, dtype=np.float64)
    return numbers
