"""A measured gradient on its way from the device to the host."""

import functools
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rankscope.bus.gradient_part import NUMBERS, sizes_of
from rankscope.bus.probe import Awaited, Content, MessagePart, Pending, Ready
from rankscope.gradients.host import HostCopy, Share
from rankscope.gradients.kernels.launch import Launching
from rankscope.gradients.kernels.native import NoLibraryError, compiled
from rankscope.gradients.totals import Folding, fold_plain, fold_signs
from rankscope.wrappers.tap import LocalGradient

_DOUBLE = struct.Struct("=d")
_gathering = Launching("measurements are gathered")


def begin_transfer(
    measured: LocalGradient,
    *,
    sketch_width: int,  # numbers to send of the total's sketch, at most its width; or 0
    group_width: int,  # of each group's sketch
    section_counts: tuple[int, ...] = (),  # rows of each group, in an audit; empty: one
    audit_width: int = 0,  # numbers in each section's sketch for the audit; 0 without
) -> Pending:
    """Copy measurements to the host: two vectors, small whatever the model's size.

    On the CPU they are there at once, by one call of a compiled function. On an accelerator with a
    kernel of its own, one launch gathers them, and one more for each measurement that not all steps
    have: norms of micro-batches, the carried-over flag, the product with the reduced gradient. They
    are copied with all else that the step measures there.
    """
    micro = measured.micro_squared_norms
    changes = measured.accumulator_changes
    form = _form(
        measured.totals.sketches.shape,
        section_counts,
        (sketch_width, group_width, audit_width),
        0 if micro is None else len(micro),
        reduced=measured.reduced is not None,
        carried=measured.carried_over is not None,
        norm_estimated=measured.norm_estimated,
        accumulator_changes=0 if changes is None else len(changes),
    )
    if measured.totals.memory.is_cpu and _is_compiled():
        return Ready(form.part(form.gather(measured)))
    copies = _copies(measured, form.folding)
    return Awaited(copies, functools.partial(form.read, copies))


class _Form:
    """The layout of the message of gradients that are alike."""

    def __init__(
        self,
        folding: Folding,
        lengths: Mapping[str, int],  # numbers in each part, by its name in NUMBERS
        *,
        norm_estimated: bool,
    ) -> None:
        self.folding = folding
        sizes = sizes_of(lengths, folding.lengths, norm_estimated=norm_estimated)
        self.sizes = array("q", sizes).tobytes()  # of the parts of numbers and sketches
        # the bytes where the numbers end, and then the sketches
        *firsts, self.num_bytes = accumulate((8 * lengths[name] for name in NUMBERS), initial=0)
        self._firsts = dict(zip(NUMBERS, firsts, strict=True))
        self.end = self.num_bytes + 4 * sum(folding.lengths.values())
        self._native: tuple[Any, ...] | None = None
        self._micro = lengths["micro"]

    def read(self, copies: Sequence[HostCopy | Share]) -> MessagePart:
        """Wait for the copies of numbers and sketches, or of both together."""
        return self.part(*(copy.numpy().tobytes() for copy in copies))

    def part(self, numbers: Content, sketches: Content | None = None) -> MessagePart:
        """Return the arrays of a step's message that hold the gradient.

        Sketches that are not given lie behind the numbers.
        """
        if sketches is None:
            whole = memoryview(numbers)
            numbers = whole[: self.num_bytes]
            sketches = whole[self.num_bytes : self.end]
        return MessagePart(arrays={"numbers": numbers, "sizes": self.sizes, "sketches": sketches})

    def gather(self, measured: LocalGradient) -> bytearray:
        """Return numbers and sketches of totals in the host's memory, one behind the other."""
        if self._native is None:
            self._native = self._prepare()
        function, form, folds, _ = self._native
        into = bytearray(self.end)
        reduced = measured.reduced
        function(
            form,
            folds,
            measured.totals.memory.data_ptr(),
            None if reduced is None else reduced.memory.data_ptr(),
            byref(c_char.from_buffer(into)),
        )
        firsts = self._firsts
        if measured.carried_over is not None:
            _DOUBLE.pack_into(into, firsts["carried"], measured.carried_over)
        vectors = {"micro": measured.micro_squared_norms, "kept": measured.accumulator_changes}
        for name, vector in vectors.items():
            if vector is not None:
                content = vector.numpy().tobytes()
                into[firsts[name] : firsts[name] + len(content)] = content
        return into

    def _prepare(self) -> tuple[Any, ...]:
        """Return the compiled function, the addresses of its arguments, and the arguments."""
        folding = self.folding
        signs = fold_signs(folding.wide, 0, torch.device("cpu"))
        folds = array("q", (number for fold in folding.by_row for number in fold))
        form = array(
            "q",
            (folding.num_rows, folding.wide, self._micro, self.num_bytes, self.end,
             len(folds) // 4, signs.data_ptr()),
        )  # fmt: skip
        addresses = (each.buffer_info()[0] for each in (form, folds))
        return compiled("hand_over"), *addresses, (form, folds, signs)


@functools.lru_cache(maxsize=64)
def _form(
    shape: tuple[int, int],  # rows of the totals, and numbers in the sketch of each
    section_counts: tuple[int, ...],  # rows of each group; empty: one
    widths: tuple[int, int, int],  # of the sketch of the total, of each group, of each section
    micro: int,  # micro-batches that have norms
    *,
    reduced: bool,
    carried: bool,
    norm_estimated: bool,
    accumulator_changes: int,  # numbers that describe changes between micro-batches
) -> _Form:
    """Return the layout of the message.

    Where each group has one section, the sketch for the audit is that of the group as well.
    """
    num_rows, wide = shape
    counts = section_counts or (1,) * num_rows
    sketch, group, audit = widths
    if group == audit and len(counts) == num_rows:
        group = 0
    lengths = {
        "squares": num_rows,
        "reduced_squares": num_rows * reduced,
        "micro": micro,
        "largest": 1,
        "nonfinite": 1,
        "carried": int(carried),
        "kept": accumulator_changes,
    }
    folding = Folding(counts, wide, sketch, group, audit, reduced)
    return _Form(folding, lengths, norm_estimated=norm_estimated)


def _copies(measured: LocalGradient, folding: Folding) -> list[HostCopy | Share]:
    """Start the copies from a device: of numbers and sketches together, or of each."""
    if _gathering.possible and _launches_on(measured.totals.sketches):
        try:
            share = Share(measured.totals.sketches.device)
            launch(measured, folding, share.take)
            return [share]
        except Exception as error:
            _gathering.give_up(error)
    numbers = torch.cat(list(_numbers(measured).values()))
    sketches = fold_plain(measured.totals, measured.reduced, folding)
    return [HostCopy(numbers, own=True), HostCopy(sketches, own=True)]


def _launches_on(tensor: Tensor) -> bool:
    """Return whether there is a kernel for a tensor's device."""
    return tensor.is_cuda and torch.version.hip is None


def launch(
    measured: LocalGradient, folding: Folding, take: Callable[[int], Tensor] | None = None
) -> Tensor:
    """Gather numbers, float64 ``[n]``, and behind them float32 sketches with one launch.

    ``take`` returns so many words of 64 bits on the device; None for new ones.
    """
    from rankscope.gradients.kernels.fused import hand_over

    given = _given(measured)
    if measured.micro_squared_norms is not None:
        given["micro"] = measured.micro_squared_norms
    take = measured.totals.squared_norms.new_empty if take is None else take
    return hand_over(measured.totals, measured.reduced, folding, given, take)


@functools.cache
def _is_compiled() -> bool:
    try:
        compiled("hand_over")
    except NoLibraryError:
        return False
    return True


def _given(measured: LocalGradient) -> dict[str, Tensor]:
    """Return the measurements that not all steps have, as float64 vectors."""
    given: dict[str, Tensor] = {}
    if measured.carried_over is not None:
        given["carried"] = measured.carried_over.reshape(1).double()
    if measured.accumulator_changes is not None:
        given["kept"] = measured.accumulator_changes
    return given


def _numbers(measured: LocalGradient) -> dict[str, Tensor]:
    """Return the numbers, in float64, in the order of ``NUMBERS``."""
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
