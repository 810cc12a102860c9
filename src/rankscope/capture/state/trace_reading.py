"""Reads any tensors for a trace: digest, norm and sketch, without waiting for the device.

Two runs are compared by these numbers, so each depends on a tensor's bits and name alone, not on
the seed of a run, its groups or its other tensors. A tensor is cut into pieces; the sketch of each
is taken at full width in float32 and folded in float64, so that rounding stays near 1e-7 of the
tensor's norm, however large it is.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from rankscope.capture.host import HostCopy
from rankscope.capture.kernels import ParameterSigns, choose_kernel, period_signs
from rankscope.capture.kernels.bits import signed
from rankscope.capture.kernels.flat import flat_parts
from rankscope.capture.sketch import DEFAULT_WIDTH
from rankscope.capture.state.digest import PendingDigest, digest_bits, word_of
from rankscope.capture.totals import GradientTotals
from rankscope.core.replicas import TRACE_WIDTH, StateKind, Trace

UNREADABLE = PendingDigest(word_of("cannot be read"))

_SEED = 0  # of the signs, whatever the seed of the run
_ROWS = 64  # pieces that are folded at once
_PIECE = {"cpu": 1 << 18}  # elements: 64 sums for each number of the wide sketch
_PIECE_ACCELERATOR = 1 << 26  # its kernel adds up in many short sums, and starts slowly
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)

_log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A tensor whose digest may still be computed: what it is, its name, the digest."""

    kind: StateKind
    name: str
    digest: PendingDigest


class TraceReader:
    """Reads tensors without waiting for their device, in scratch space of a fixed size.

    Calls on one accelerator must follow one another on its stream.

    Args:
        device: Where the tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel = choose_kernel(device, DEFAULT_WIDTH, period_signs(_SEED))
        self._signs: dict[str, ParameterSigns] = {}
        self._scratch = GradientTotals.zeros(_ROWS, DEFAULT_WIDTH, device)
        self._fold = _Fold(device)
        self._piece = _PIECE.get(device.type, _PIECE_ACCELERATOR)
        self._told = False

    @torch.no_grad()
    def read(
        self, tensors: Iterable[tuple[StateKind, str, Tensor]], digests: Iterable[PendingRow] = ()
    ) -> "PendingRows":
        """Start to read tensors; whatever happens to them later is not seen.

        Args:
            tensors: What each is, its canonical name, and the tensor: any shape, layout and dtype.
            digests: Further rows, of which only a digest is known.

        Returns:
            One row per tensor, in order, then those of ``digests``.
        """
        rows: list[PendingRow] = []
        owners: list[int] = []
        folded: list[Tensor] = []
        squares: list[Tensor] = []
        self._scratch.reset()
        used = 0
        for kind, name, tensor in tensors:
            number = len(rows)
            rows.append(PendingRow(kind, name, self._digest(tensor)))
            for position, piece in self._pieces(tensor):
                if used == _ROWS:
                    self._empty(used, folded, squares)
                    used = 0
                self._measure(name, piece, position, used)
                owners.append(number)
                used += 1
        self._empty(used, folded, squares)
        return PendingRows(
            [*rows, *digests],
            len(rows),
            np.array(owners, np.int64),
            HostCopy(torch.cat(folded)),
            HostCopy(torch.cat(squares)),
        )

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield position and elements of a tensor's pieces; None for what cannot be read."""
        try:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if not _lies_in_memory(tensor, self._device):
                yield 0, None
                return
            for position, flat in flat_parts(tensor):
                for start in range(0, len(flat), self._piece):
                    yield position + start, flat[start : start + self._piece].contiguous()
        except Exception as error:  # whatever kind of tensor it is
            self._tell(error)
            yield 0, None

    def _measure(self, name: str, piece: Tensor | None, position: int, row: int) -> None:
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = ParameterSigns(name, _SEED, self._device)
        try:
            if piece is not None:
                first = signs.first % DEFAULT_WIDTH + position
                self._kernel.measure(piece, signs, first, self._scratch, row)
                return
        except Exception as error:  # whatever dtype it has
            self._tell(error)
        self._scratch.squared_norms[row] = math.nan

    def _digest(self, tensor: Tensor) -> PendingDigest:
        try:
            return digest_bits(tensor)
        except Exception as error:  # whatever kind of tensor it is
            self._tell(error)
            return UNREADABLE

    def _empty(self, used: int, folded: list[Tensor], squares: list[Tensor]) -> None:
        """Fold what lies in the first rows of the scratch space, and clear it."""
        folded.append(self._fold(self._scratch.sketches[:used]))
        squares.append(self._scratch.squared_norms[:used].clone())
        self._scratch.reset()

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.debug("some tensors cannot be traced: %s", error)


class PendingRows:
    """Rows of a trace on their way to the host. P pieces of the tensors.

    Args:
        rows: All rows.
        num_read: How many of them were read in pieces; of the others only a digest is known.
        owners_P: The row to which each piece belongs.
        sketches: float64 ``[P, k]``.
        squared_norms: float64 ``[P]``.
    """

    def __init__(
        self,
        rows: list[PendingRow],
        num_read: int,
        owners_P: NDArray[np.int64],
        sketches: HostCopy,
        squared_norms: HostCopy,
    ) -> None:
        self._rows = rows
        self._num_read = num_read
        self._owners_P = owners_P
        self._sketches, self._squared_norms = sketches, squared_norms
        pending = [tensor for row in rows for _, tensor in row.digest.pending]
        devices = dict.fromkeys(tensor.device for tensor in pending)
        self._digests = {
            device: HostCopy(torch.stack([t for t in pending if t.device == device]))
            for device in devices
        }

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        copies = (self._sketches, self._squared_norms, *self._digests.values())
        return all(copy.ready for copy in copies)

    def read(self) -> Trace:
        """Wait for the device."""
        sketches_NK = np.zeros((len(self._rows), TRACE_WIDTH))
        squares_N = np.zeros(len(self._rows))
        np.add.at(sketches_NK, self._owners_P, self._sketches.numpy())
        np.add.at(squares_N, self._owners_P, self._squared_norms.numpy())
        squares_N[self._num_read :] = math.nan
        arrived = {device: iter(copy.numpy()) for device, copy in self._digests.items()}
        digests = []
        for row in self._rows:
            parts = (factor * int(next(arrived[t.device])) for factor, t in row.digest.pending)
            digests.append(signed(row.digest.known + sum(parts)))
        with np.errstate(over="ignore", invalid="ignore"):  # of a gradient that has overflown
            narrow_NK = sketches_NK.astype(np.float32)
        return Trace(
            tuple(row.kind for row in self._rows),
            tuple(row.name for row in self._rows),
            np.array(digests, np.int64),
            np.sqrt(squares_N),
            narrow_NK,
        )


class _Fold:
    """Makes narrow sketches from wide ones: entry c, with a random sign, is added to c mod k.

    It adds up in float64, in space of its own.

    Args:
        device: Where the sketches live.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        bits = torch.randint(2, (DEFAULT_WIDTH,), generator=generator, device="cpu")
        self._signs = bits.mul_(2).sub_(1).to(device, torch.float64)
        width = -(-DEFAULT_WIDTH // TRACE_WIDTH) * TRACE_WIDTH
        self._room = torch.zeros(_ROWS, width, dtype=torch.float64, device=device)

    def __call__(self, sketches: Tensor) -> Tensor:
        """Return float64 ``[P, k]`` of float32 ``[P, wide]``, for up to ``_ROWS`` of them."""
        used = len(sketches)
        room = self._room[:used]
        torch.mul(sketches, self._signs, out=room[:, :DEFAULT_WIDTH])
        return room.view(used, self._room.shape[1] // TRACE_WIDTH, TRACE_WIDTH).sum(1)


def _lies_in_memory(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the elements of a tensor can be read at its address on a device."""
    if type(tensor) not in _ORDINARY or tensor.device != device or is_lazy(tensor):
        return False
    if tensor.layout != torch.strided:
        return True  # its parts are copied
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    needed = (tensor.storage_offset() + length) * tensor.itemsize
    return not length or tensor.untyped_storage().nbytes() >= needed
