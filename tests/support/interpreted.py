"""The Triton kernel on the CPU, by Triton's interpreter, which needs a process of its own."""

import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.tap import LocalGradient
from rankscope.wrappers.transfer import launch
from support.kernel_checks import CPU


@contextmanager
def interpreter():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin) as process:
        yield process


def measure_interpreted(process, meter, groups, sections, gradients, **options):
    """Measure several gradients at once, each at an address that is as aligned as it is here."""
    shape = (len(groups) if sections is None else len(sections), options["width"])
    offsets = [gradient.storage_offset() for gradient in gradients.values()]
    sent = _packed(list(gradients.values()), offsets)
    arguments = meter, groups, sections, list(gradients), sent, options
    memory = _unpacked(process.submit(_run_many, *arguments).result())[0]
    return GradientTotals(memory, *shape)


def _run_many(meter, groups, sections, names, sent, options):
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


def launch_interpreted(process, measured, folding, take):
    """Gather what was measured, as :func:`rankscope.wrappers.transfer.launch` does."""
    totals = [t and (t.memory, *t.sketches.shape) for t in (measured.totals, measured.reduced)]
    others = (*(measured.micro_squared_norms, measured.carried_over, measured.accumulator_changes),)
    [gathered] = _unpacked(process.submit(_run_launch, _packed(totals, others), folding).result())
    return take(len(gathered)).view(torch.float64).copy_(gathered)


def _run_launch(sent, folding):
    (local, reduced), (micro, carried, kept) = _unpacked(sent)
    measured = LocalGradient(
        GradientTotals(*local),
        None if reduced is None else GradientTotals(*reduced),
        micro,
        carried,
        accumulator_changes=kept,
    )
    return _packed(launch(measured, folding))


def _begin():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _packed(*values):
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(packed):
    return torch.load(io.BytesIO(packed))
