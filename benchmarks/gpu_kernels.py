"""Parts of ``make gpu``: the environment, and every kernel against plain torch."""

import functools
import importlib
import importlib.util
import math
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_common import (
    CPU,
    NotPossibleError,
    Setup,
    Values,
    attempt,
    kernel_for,
    plain_for,
    use_kernel,
)
from gpu_page import DTYPES, PARTS
from torch import Tensor

from rankscope.bus.groups import Sections, cut_sections, group_parameters
from rankscope.gradients.digest import digest_bits
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals

Named = Sequence[tuple[str, Tensor]]
_SIZES = (1, 3, 1021, 4093, 4094, 8191, 20_464, 368_387, 3_000_017)
_SIZES_DRY = (1, 254)
_SCALES = {"float32": (1e25, 1e-25), "bfloat16": (1e36, 1e-30), "float16": (6e4, 1e-7)}
_MASK = (1 << 64) - 1


def measure_environment(setup: Setup) -> Iterator[Values]:
    """Say what there is to measure with."""
    if setup.dry:
        found: Values = dict.fromkeys(PARTS["environment"].rows, "a dry run")
    else:
        properties = torch.cuda.get_device_properties(0)
        version: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
        found = {
            "devices": f"{torch.cuda.device_count()} × {properties.name}",
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory of a device": f"{properties.total_memory / 2**30:.0f} GiB",
            "CUDA": torch.version.cuda or "none",
            "NCCL": ".".join(map(str, version)) or "none",
            "Triton": _triton_version(),
        }
    groups = group_parameters(["weight"])
    found |= {
        "Python": platform.python_version(),
        "missing packages": ", ".join(missing_packages()) or "none",
        "kernel of the sketch": Sketcher(setup.device, groups).kernel,
        "kernel of the digests": _digest_kernel(setup),
    }
    yield found


def missing_packages() -> list[str]:
    """Return the packages that are not installed, of those that some part needs."""
    needed = ["pyzmq", *dict.fromkeys(name for part in PARTS.values() for name in part.needs)]
    modules = {"pyzmq": "zmq"}
    return [name for name in needed if importlib.util.find_spec(modules.get(name, name)) is None]


def _triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return "none"
    return str(importlib.import_module("triton").__version__)


def _digest_kernel(setup: Setup) -> str:
    from rankscope.gradients.kernels.many import device_reader

    return "torch" if device_reader(setup.device) is None else "triton"


# Kernels ---------------------------------------------------------------------------------------


def measure_kernels(setup: Setup) -> Iterator[Values]:
    """Compare every kernel with plain torch on the same device, and digests with the host's."""
    for name in DTYPES:
        rows = [row for row in PARTS["kernels"].rows if f" of {name}:" in row]
        yield attempt(rows, partial(_compared, setup, name))
    yield attempt((_SECTIONS, _AGAIN), partial(_sectioned, setup))
    yield attempt((_DIGESTS, _SQUARES), partial(_digested, setup))
    yield attempt((_HANDOVER,), partial(_handed_over, setup))


_SECTIONS, _AGAIN, _DIGESTS, _SQUARES, _HANDOVER = list(PARTS["kernels"].rows)[-5:]


def check_interpreter(setup: Setup) -> None:
    """Check that Triton's interpreter can do what a dry run needs.

    Raises:
        NotPossibleError: It cannot, in this version.
    """
    if setup.dry:
        import numpy as np
        from torch.torch_version import TorchVersion

        if TorchVersion(_triton_version()) < "3.7" and TorchVersion(np.__version__) >= "2.4":
            raise NotPossibleError("this Triton's interpreter does not bear this numpy")


def _compared(setup: Setup, name: str) -> Values:
    """Compare sketches, norms, largest magnitudes and non-finite counts of one type."""
    check_interpreter(setup)
    gradients = list(_gradients(setup, getattr(torch, name), _SCALES[name]))
    ours, plain = (_measured(setup, gradients, triton=triton) for triton in (True, False))
    norms = zip(ours.squared_norms.tolist(), plain.squared_norms.tolist(), strict=True)
    both = zip(ours.largest, plain.largest, ours.nonfinite, plain.nonfinite, strict=True)
    equal = [
        torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) and bool(c == d) for a, b, c, d in both
    ]
    return {
        f"sketches of {name}: largest difference over their RMS": _apart(ours, plain),
        f"squared norms of {name}: largest relative difference": max(_relative(*n) for n in norms),
        f"largest and non-finite of {name}: equal": _of(equal),
    }


def measure_all(sketcher: Sketcher, gradients: Named, totals: GradientTotals) -> None:
    """Measure gradients, at once where a sketcher can."""
    at_once: Any = getattr(sketcher, "measure_many", None)
    if at_once is not None:
        at_once(tuple((name, gradient, 0) for name, gradient in gradients), totals)
    else:
        for name, gradient in gradients:
            sketcher.measure(name, gradient, totals)


def _gradients(
    setup: Setup, dtype: torch.dtype, scales: tuple[float, float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield odd ones, each by a name of its own: sizes, places, strides, limits, not finite."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, scale: float = 1e-3) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).clamp_(-4, 4)
        return (values / 4 * scale).to(dtype).to(setup.device)

    sizes = setup.pick(_SIZES, _SIZES_DRY)
    rows = setup.pick(700, 2)
    yield from ((f"size {size}", random(size)) for size in sizes)
    yield from (
        (f"from element {k}", random(sizes[-1] + k)[k:]) for k in setup.pick((1, 2, 5), (1,))
    )
    yield "transposed", random(rows, 129).t()
    yield "every second", random(sizes[-1])[::2]
    yield "expanded", random(1, 67).expand(rows, 67)
    yield "matrix", random(rows, 131)
    yield "nothing", random(0)
    yield "zero", torch.zeros(sizes[-1], dtype=dtype, device=setup.device)
    yield from ((f"about {scale}", random(sizes[-1], scale=scale)) for scale in scales)
    for name, values in {"infinite": [math.inf, -math.inf], "not a number": [math.nan, 1]}.items():
        for place in (0, sizes[-1] - 2)[: setup.pick(2, 1)]:
            broken = random(sizes[-1])
            broken[place : place + 2] = torch.tensor(values)
            yield f"{name} at {place}", broken


def _measured(
    setup: Setup, gradients: Named, sections: Sections | None = None, *, triton: bool
) -> GradientTotals:
    """Measure each into a row of its own, or into those of sections."""
    width = setup.pick(4093, 251)
    groups = group_parameters([name for name, _ in gradients], str)
    sketcher = Sketcher(setup.device, groups, width, 0, sections)
    use_kernel(sketcher, (kernel_for if triton else plain_for)(setup, width))
    totals = sketcher.new_totals()
    measure_all(sketcher, gradients, totals)
    setup.synchronise()
    return totals


def _sectioned(setup: Setup) -> Values:
    size = setup.pick(5_000_011, 500)
    gradients = [(f"part {k}", torch.randn(size + k, device=setup.device)) for k in range(2)]
    groups = group_parameters([name for name, _ in gradients], str)
    sizes = {name: gradient.numel() for name, gradient in gradients}
    sections = cut_sections(sizes, groups, section_elements=size // 3)
    ours, again = (_measured(setup, gradients, sections, triton=True) for _ in range(2))
    plain = _measured(setup, gradients, sections, triton=False)
    both = zip(ours.tensors, again.tensors, strict=True)
    return {_SECTIONS: _apart(ours, plain), _AGAIN: all(torch.equal(a, b) for a, b in both)}


def _apart(ours: GradientTotals, plain: GradientTotals) -> float:
    """Return the largest difference of sketches, over the RMS of the row; infinite if unlike."""
    a_RK, b_RK = ours.sketches.double(), plain.sketches.double()
    finite_RK = b_RK.isfinite()
    if not torch.equal(a_RK.isfinite(), finite_RK):
        return math.inf
    b_RK = b_RK.where(finite_RK, 0.0)
    rms_R1 = b_RK.square().mean(1, keepdim=True).sqrt()
    apart_RK = (a_RK.where(finite_RK, 0.0) - b_RK).abs() / rms_R1.where(rms_R1 > 0, 1.0)
    return float(apart_RK.max())


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) and b else math.inf


def _of(equal: list[bool]) -> str:
    return f"{sum(equal):,} of {len(equal):,}"


# Digests and handover --------------------------------------------------------------------------


def on_device(setup: Setup) -> Any:
    """Return the module of readings; in a dry run it reads the CPU as if it were a device."""
    from rankscope.gradients.kernels import many

    readings: Any = importlib.import_module("rankscope.evidence.state.readings")
    if setup.dry:
        reader = functools.cache(many.DeviceReader)
        readings.native_sum = lambda: None
        readings.device_reader = reader
    elif many.device_reader(setup.device) is None:
        raise NotPossibleError("the kernel of the digests does not work here: see the log")
    return readings


def _digested(setup: Setup) -> Values:
    reading = on_device(setup).PendingDigests()
    types = (*DTYPES, "float64", "int64", "int32", "uint8", "bool", "complex64")
    sizes = setup.pick((0, 1, 3, 1023, 4097, 2_000_003), (0, 1023))
    expected, squares = [], []
    for name in types:
        for size in sizes:
            dtype: torch.dtype = getattr(torch, name)
            whole = torch.randn(size + 1, dtype=torch.float64).mul_(50).to(dtype)
            host, device = whole[1:], whole.to(setup.device)[1:]  # no address that is aligned
            reading.add(device, norm=dtype.is_floating_point)
            expected.append(digest_bits(host.clone()).known & _MASK)
            squares.append(float(host.double().square().sum()) if dtype.is_floating_point else 0.0)
    digests, found = reading.begin().read()
    equal = [a == b for a, b in zip(digests, expected, strict=True)]
    apart = max(_relative(a, b) for a, b in zip(found, squares, strict=True))
    return {_DIGESTS: _of(equal), _SQUARES: apart}


def _handed_over(setup: Setup) -> Values:
    """Compare the sketches that one launch folds with those that plain torch folds."""
    fused = importlib.import_module("rankscope.gradients.kernels.fused")
    if not hasattr(fused, "hand_over"):
        raise NotPossibleError("this version has no such kernel")
    handover: Any = importlib.import_module("rankscope.wrappers.transfer")
    folding_of: Any = importlib.import_module("rankscope.gradients.totals").Folding
    tap: Any = importlib.import_module("rankscope.wrappers.tap")
    equal = []
    for rows, audit in setup.pick(((1, 0), (5, 13), (40, 251)), ((2, 13),)):
        totals, reduced = (GradientTotals.zeros(rows, 1021, setup.device) for _ in range(2))
        for each in (totals, reduced):
            each.sketches.normal_()
            each.squared_norms.uniform_(1, 2)
        measured = tap.LocalGradient(totals, reduced)
        folding = folding_of((1,) * rows, 1021, 1021, 251, audit, reduced=True)
        launched = handover.launch(measured, folding).to(CPU)
        numbers = torch.cat(list(handover._numbers(measured).values())).to(CPU)
        floats = handover.fold_plain(totals, reduced, folding).to(CPU)
        ours = launched[len(numbers) :].view(torch.float32)[: len(floats)]
        equal += [torch.allclose(launched[: len(numbers)], numbers, rtol=1e-12)]
        equal += [torch.allclose(ours, floats, rtol=1e-5, atol=1e-5)]
    return {_HANDOVER: _of(equal)}
