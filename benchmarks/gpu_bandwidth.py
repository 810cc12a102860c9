"""A part of ``make gpu``: how fast the kernels read, beside torch's own norm and a copy."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_common import Setup, Spread, Values, attempt, kernel_for, use_kernel
from gpu_kernels import check_interpreter, measure_all, on_device
from gpu_model import Llama
from gpu_page import PARTS
from torch import Tensor

from rankscope.bus.groups import group_parameters
from rankscope.gradients.sketch import Sketcher

Work = Callable[[], object]
WARM_UP = 3
_AHEAD = 5_000_000  # cycles that the device is busy while the host prepares what is timed
NORM, COPY = "torch's norm", "a copy"


def measure_bandwidth(setup: Setup) -> Iterator[Values]:
    """Time the kernels over the gradients of a model of 1 B parameters, in turns with torch's."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Llama(setup).named_parameters()}
    if setup.dry:
        shapes = dict(list(shapes.items())[1:3])
    yield {"elements": sum(map(math.prod, shapes.values())), "tensors": len(shapes)}
    for name in ("bfloat16", "float32"):
        rows = [row for row in PARTS["bandwidth"].rows if row.startswith(name)]
        yield attempt(rows, partial(_measured, setup, shapes, name))


def _measured(setup: Setup, shapes: dict[str, torch.Size], name: str) -> Values:
    check_interpreter(setup)
    sizes = [shape.numel() for shape in shapes.values()]
    flat = torch.randn(sum(sizes), device=setup.device, dtype=getattr(torch, name))
    named = zip(shapes.items(), flat.split_with_sizes(sizes), strict=True)
    gradients = [(key, piece.view(shape)) for (key, shape), piece in named]
    return _rows(name, flat.nbytes, _timed(setup, _works(setup, flat, gradients)))


def _works(setup: Setup, flat: Tensor, gradients: list[tuple[str, Tensor]]) -> dict[str, Work]:
    width = setup.pick(4093, 251)
    sketcher = Sketcher(setup.device, group_parameters([name for name, _ in gradients]), width)
    use_kernel(sketcher, kernel_for(setup, width))
    totals, norms = sketcher.new_totals(), sketcher.new_totals()
    reading_of = on_device(setup).PendingDigests

    def digest() -> object:
        reading = reading_of()
        for _, gradient in gradients:
            reading.add(gradient)
        return reading.begin()

    return {
        "sketch": partial(measure_all, sketcher, gradients, totals),
        "norms": partial(sketcher.measure_norms, gradients, norms),
        "digests": digest,
        NORM: partial(torch.linalg.vector_norm, flat, dtype=torch.float32),
        COPY: partial(torch.empty_like(flat).copy_, flat),
    }


def _timed(setup: Setup, works: dict[str, Work]) -> dict[str, list[float]]:
    """Return seconds of the device by what is timed; the host is ahead, as it is in a training."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + setup.seconds / 4
    least, most = setup.pick((WARM_UP + 8, 200), (1, 1))
    rounds = 0
    while rounds < least or (rounds < most and time.perf_counter() < end):
        for name, work in works.items():
            setup.synchronise()
            seconds[name].append(_seconds(setup, work))
        rounds += 1
    return {name: values[setup.pick(WARM_UP, 0) :] for name, values in seconds.items()}


def _seconds(setup: Setup, work: Work) -> float:
    if setup.dry:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (_event() for _ in range(2))
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    begin.record()
    kept = work()
    end.record()
    torch.cuda.synchronize()
    del kept
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _rows(dtype: str, size: int, seconds: dict[str, list[float]]) -> Values:
    moved = {name: size * (2 if name == COPY else 1) for name in seconds}
    rates = {name: [moved[name] / s / 1e9 for s in each] for name, each in seconds.items()}
    found: Values = {f"{dtype}: {name}": Spread.of(each) for name, each in rates.items()}
    for name in ("sketch", "digests"):
        for reference in (NORM, COPY):
            pairs = zip(rates[name], rates[reference], strict=True)
            found[f"{dtype}: {name} / {reference}"] = Spread.of([a / b for a, b in pairs])
    return found
