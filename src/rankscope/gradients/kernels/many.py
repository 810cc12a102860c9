"""Digests of many parts of an accelerator's memory in one launch.

The results are copied to the host with all else that a step measures there.
"""

import functools
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.gradients.host import Share
from rankscope.gradients.kernels.bits import NUMBERS, ROW_BYTES, block_factor, plain_sum, tables_on
from rankscope.gradients.kernels.launch import launcher, log_fallback

CHUNK_BYTES = 32 * ROW_BYTES
"""Bytes that one program reads; they divide the bytes of one block of multipliers."""

_BLOCK_BYTES = ROW_BYTES << 16
_MOST_TABLES = 512
_ALIGNED = 2  # words
_MODULUS = 1 << 64


class DeviceReader:
    """Reads parts of one device's memory.

    Tables that describe parts stay on the device: of parameters and of the optimizer's state, and
    often of gradients, the same are read again and again.
    """

    def __init__(self, device: torch.device) -> None:
        from rankscope.gradients.kernels import triton_digest

        self.device = device
        self._kernels: Any = triton_digest
        self._tables = tables_on(device)
        self._known: dict[tuple[int, ...], _Chunks] = {}
        self.launches = 0
        """Launches, and tables copied to the device, so far."""

    def launch(self, parts: tuple[int, ...], *, squares: bool) -> "tuple[_Chunks, Share]":
        """Begin to read N parts, each an address, bytes and a type of ``NUMBERS``.

        Returned are how they are cut, and what arrives. On its way to the host is int64 ``[2,
        C']``, ``C'`` >= C: sums, and the bits of the sums of squares. Without squares, it is ``[1,
        C']``.
        """
        chunks = self._known.pop(parts, None)
        if chunks is None:
            self.launches += 1
            chunks = _Chunks(parts, self.device)
            if len(self._known) >= _MOST_TABLES:
                del self._known[next(iter(self._known))]  # the one whose turn was longest ago
        self._known[parts] = chunks
        number = len(chunks.owners_C)
        share = Share(self.device)
        tables = self._tables
        results = share.take((1 + squares) * chunks.room)
        self.launches += 1
        with torch.cuda.device_of(results):  # type: ignore[no-untyped-call]
            launcher(self._kernels.digest_chunks)(
                number,
                chunks.table, tables.first, tables.second, tables.multipliers,
                results, results[squares * chunks.room :].view(torch.float64), SQUARES=squares,
            )  # fmt: skip
        return chunks, share


class _Chunks:
    """Parts cut into chunks."""

    def __init__(self, parts: tuple[int, ...], device: torch.device) -> None:
        parts_N = np.array(parts, np.int64).reshape(-1, 3)
        address_N, bytes_N, _ = parts_N.T
        counts_N = -(-bytes_N // CHUNK_BYTES)
        self.owners_C = np.repeat(np.arange(len(parts_N)), counts_N)  # the part of each chunk
        # C, rounded up so that what comes behind is aligned
        self.room = -(-len(self.owners_C) // _ALIGNED) * _ALIGNED
        first_C = np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        start_C = (np.arange(len(self.owners_C)) - first_C) * CHUNK_BYTES
        table_C = np.empty((len(self.owners_C), 5), np.int64)
        table_C[:, 0] = address_N[self.owners_C] + start_C
        table_C[:, 1] = np.minimum(bytes_N[self.owners_C] - start_C, CHUNK_BYTES)
        table_C[:, 2] = start_C % _BLOCK_BYTES // ROW_BYTES
        table_C[:, 3] = np.gcd(np.gcd(address_N, bytes_N), 4)[self.owners_C]
        table_C[:, 4] = parts_N[self.owners_C, 2]
        blocks_C = (start_C // _BLOCK_BYTES).tolist()
        self.filled_F = np.flatnonzero(counts_N)  # parts that have chunks, and their first ones
        self.firsts_F = np.cumsum(counts_N)[self.filled_F] - counts_N[self.filled_F]
        self.factors_C = np.array([block_factor(block) for block in blocks_C], np.uint64)
        host = torch.from_numpy(table_C)
        if device.type != "cpu":
            host = host.pin_memory()
        self.table = host.to(device, non_blocking=True)


class DeviceParts:
    """Parts of one device's memory that are to be read by one launch."""

    def __init__(self, reader: DeviceReader) -> None:
        self._reader = reader
        self._numbers: list[int] = []
        self._norms: list[bool] = []
        self._parts: list[int] = []

    def add(self, number: int, address: int, size: int, numbers: int, *, norm: bool) -> None:
        """Add a part of ``size`` bytes; ``number`` is its own in the reading, ``numbers`` its type.

        The type is one of ``NUMBERS``, or 0; ``norm`` adds up its squares.
        """
        self._numbers.append(number)
        self._norms.append(norm)
        self._parts += (address, size, numbers)

    def forget(self, number: int) -> None:
        """Forget the parts from a number on."""
        while self._numbers and self._numbers[-1] >= number:
            self._numbers.pop()
            self._norms.pop()
            del self._parts[-3:]

    def launch(self) -> "tuple[Launched, ...]":
        """Begin to read them; return nothing where they have no bytes."""
        if not any(self._parts[1::3]):
            return ()
        launched = self._reader.launch(tuple(self._parts), squares=any(self._norms))
        return (Launched(self._numbers, self._norms, *launched),)


class Launched:
    """The results of a launch, on their way to the host."""

    def __init__(
        self, numbers: list[int], norms: list[bool], chunks: _Chunks, results: Share
    ) -> None:
        self._numbers = numbers
        self._norms = norms
        self._chunks = chunks
        self._results = results

    @property
    def ready(self) -> bool:
        """Whether :meth:`add_to` would not wait."""
        return self._results.ready

    def add_to(self, digests: list[int], squares: list[float]) -> None:
        """Wait for the device and add digests and sums of squares to those of a reading."""
        chunks = self._chunks
        count = len(self._numbers)
        results = self._results.numpy().reshape(-1, chunks.room)[:, : len(chunks.owners_C)]
        sums_N = np.zeros(count, np.uint64)
        sums_N[chunks.filled_F] = np.add.reduceat(
            results[0].view(np.uint64) * chunks.factors_C, chunks.firsts_F
        )
        for number, digest in zip(self._numbers, sums_N.tolist(), strict=True):
            digests[number] = (digests[number] + digest) % _MODULUS
        if len(results) > 1:
            squares_N = np.zeros(count)
            squares_N[chunks.filled_F] = np.add.reduceat(
                results[1].view(np.float64), chunks.firsts_F
            )
            each = zip(self._numbers, self._norms, squares_N.tolist(), strict=True)
            for number, norm, square in each:
                squares[number] += square if norm else 0.0


@functools.cache
def device_reader(device: torch.device) -> DeviceReader | None:
    """Return a reader of a device's memory; None where it is missing or errs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        reader = DeviceReader(device)
        check_reader(reader)
    except Exception as error:  # whatever it is, training goes on, a little slower
        log_fallback("bits are digested", error, logging.INFO)
        return None
    return reader


def check_reader(reader: DeviceReader) -> None:
    """Raise an ArithmeticError where a reader and plain torch differ."""
    waves = torch.arange(50_000, device=reader.device, dtype=torch.float32).mul_(0.7).sin_()
    samples = [waves[:40_001], *(waves.to(dtype)[3:9_008] for dtype in NUMBERS)]
    samples.append(waves.view(torch.uint8)[5:9001])
    expected = [int(plain_sum([sample], sample.device)) % _MODULUS for sample in samples]
    for norm in (False, True):
        parts = DeviceParts(reader)
        for number, sample in enumerate(samples):
            kind = NUMBERS.get(sample.dtype, 0)
            parts.add(number, sample.data_ptr(), sample.nbytes, kind, norm=norm)
        sums = [0] * len(samples)
        squares = [0.0] * len(samples)
        for launched in parts.launch():
            launched.add_to(sums, squares)
        exact = [_sum_of_squares(sample) if norm else 0.0 for sample in samples]
        apart = (abs(a - b) > 1e-9 * b for a, b in zip(squares, exact, strict=True))
        if sums != expected or any(apart):
            raise ArithmeticError("digests of the accelerator's memory err")


def _sum_of_squares(sample: Tensor) -> float:
    if sample.dtype not in NUMBERS:
        return 0.0
    flat = torch.view_as_real(sample).reshape(-1) if sample.is_complex() else sample
    return float(flat.double().square().sum())
