"""The Triton kernel, run by Triton's interpreter on the CPU.

Triton decides when it is first imported whether it interprets, so that this needs a process of its
own. The proxy here looks like a kernel and does its work there.
"""

import functools
import io
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from capture.kernel_checks import CPU, SEED
from rankscope.capture.kernels import ParameterSigns, period_signs
from rankscope.capture.kernels.choose import check_kernel
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.totals import GradientTotals


class InterpretedKernel:
    """A kernel for parameters named ``weight``."""

    name = "triton"

    def __init__(self, process: ProcessPoolExecutor, width: int, num_processors: int) -> None:
        self._process = process
        self._kernel = (width, num_processors)

    def measure(
        self, flat: Tensor, signs: ParameterSigns, start: int, into: GradientTotals, group: int
    ) -> None:
        self._work("measure", flat, start, into, group)

    def measure_norm(self, flat: Tensor, into: GradientTotals, group: int) -> None:
        self._work("measure_norm", flat, 0, into, group)

    def check(self) -> None:
        """Compare with plain torch, as is done before a kernel is used."""
        self._process.submit(_check, *self._kernel).result()

    def _work(self, name: str, flat: Tensor, start: int, into: GradientTotals, group: int) -> None:
        sent = _packed(flat, [getattr(into, field.name) for field in fields(into)])
        received = self._process.submit(_run, name, self._kernel, sent, start, group).result()
        for field, value in zip(fields(into), _unpacked(received), strict=True):
            getattr(into, field.name).copy_(value)


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Start the process, and end it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin) as process:
        yield process


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@functools.cache
def _kernel(width: int, num_processors: int) -> Any:
    from rankscope.capture.kernels.fused import TritonKernel

    return TritonKernel(CPU, width, period_signs(SEED), num_processors=num_processors)


def _run(name: str, kernel: tuple[int, int], sent: bytes, start: int, group: int) -> bytes:
    flat, values = _unpacked(sent)
    into = GradientTotals(*values)
    if name == "measure":
        signs = ParameterSigns("weight", SEED, CPU)
        _kernel(*kernel).measure(flat, signs, start, into, group)
    else:
        _kernel(*kernel).measure_norm(flat, into, group)
    return _packed(*values)


def _check(width: int, num_processors: int) -> None:
    plain = PlainKernel(CPU, width, period_signs(SEED))
    check_kernel(_kernel(width, num_processors), plain, CPU, width)


def _packed(*values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed))
