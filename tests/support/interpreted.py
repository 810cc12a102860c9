"""The Triton kernel, run by Triton's interpreter on the CPU.

Triton decides when it is first imported whether it interprets, so that this needs a process of its
own.
"""

import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rankscope.bus.groups import Groups, Sections
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import Folding, GradientTotals
from rankscope.wrappers.tap import LocalGradient
from rankscope.wrappers.transfer import launch
from support.kernel_checks import CPU


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin) as process:
        yield process


def measure_interpreted(
    process: ProcessPoolExecutor,
    meter: type[Sketcher],
    groups: Groups,
    sections: Sections | None,
    gradients: dict[str, Tensor],
    **options: int,
) -> GradientTotals:
    """Measure several gradients at once, each at an address that is as aligned as it is here."""
    shape = (len(groups) if sections is None else len(sections), options["width"])
    offsets = [gradient.storage_offset() for gradient in gradients.values()]
    sent = _packed(list(gradients.values()), offsets)
    arguments = meter, groups, sections, list(gradients), sent, options
    memory = _unpacked(process.submit(_run_many, *arguments).result())[0]
    return GradientTotals(memory, *shape)


def _run_many(
    meter: type[Sketcher],
    groups: Groups,
    sections: Sections | None,
    names: list[str],
    sent: bytes,
    options: dict[str, int],
) -> bytes:
    width, seed = options["width"], options["seed"]
    sketcher = meter(CPU, groups, width, seed, sections)
    from rankscope.gradients.kernels.fused import TritonKernel

    period = period_signs(seed)
    sketcher._kernel = TritonKernel(CPU, width, period, num_processors=options["num_processors"])
    totals = sketcher.new_totals()
    gradients = []
    for gradient, offset in zip(*_unpacked(sent), strict=True):
        memory = torch.empty(len(gradient) + offset, dtype=gradient.dtype)
        gradients.append(memory[offset:].copy_(gradient))
    sketcher.measure_many([(n, g, 0) for n, g in zip(names, gradients, strict=True)], totals)
    return _packed(totals.memory)


def launch_interpreted(
    process: ProcessPoolExecutor,
    measured: LocalGradient,
    folding: Folding,
    take: Callable[[int], Tensor],
) -> Tensor:
    """Gather what was measured, as :func:`rankscope.wrappers.transfer.launch` does."""
    totals = [t and (t.memory, *t.sketches.shape) for t in (measured.totals, measured.reduced)]
    others = (
        *(measured.micro_squared_norms, measured.carried_over),
        *(measured.reduced_product, measured.accumulator_changes),
    )
    [gathered] = _unpacked(process.submit(_run_launch, _packed(totals, others), folding).result())
    return take(len(gathered)).view(torch.float64).copy_(gathered)


def _run_launch(sent: bytes, folding: Folding) -> bytes:
    (local, reduced), (micro, carried, product, kept) = _unpacked(sent)
    measured = LocalGradient(
        GradientTotals(*local),
        None if reduced is None else GradientTotals(*reduced),
        micro,
        carried,
        reduced_product=product,
        accumulator_changes=kept,
    )
    return _packed(launch(measured, folding))


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _packed(*values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed))
