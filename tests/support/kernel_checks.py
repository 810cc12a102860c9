"""Measuring with one kernel, and comparing with the truth."""

import math
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rankscope.gradients.kernels.interface import ParameterSigns
from rankscope.gradients.totals import GradientTotals

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 3
WIDTH = 251
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without a C compiler, the package has no native kernels"
)
"""Where there is a compiler, a test of a native kernel fails if the package lacks it."""
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton for this platform")


def measured(kernel, *parts, width=WIDTH, start=0):
    """Measure consecutive parts of one parameter into the second of three groups."""
    totals = GradientTotals.zeros(3, width, CPU)
    signs = ParameterSigns("weight", SEED, CPU)
    for part in parts:
        kernel.measure(part, signs, start, totals, 1)
        start += len(part)
    return totals


def random(size, dtype=torch.float32):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return values.mul_(1e-3).to(dtype)


def expect(totals, exact):
    """Compare one group's totals with the truth, and the others with nothing."""
    scale = math.sqrt(exact.squared_norm / len(exact.sketch))
    np.testing.assert_allclose(
        totals.sketches[1].double().numpy(), exact.sketch, rtol=1e-5, atol=3e-6 * scale
    )
    assert float(totals.squared_norms[1]) == pytest.approx(exact.squared_norm, rel=1e-6)
    assert float(totals.largest[1]) == exact.largest
    assert int(totals.nonfinite[1]) == exact.nonfinite
    for field in (totals.sketches, totals.squared_norms, totals.largest, totals.nonfinite):
        assert not field[0].any()
        assert not field[2].any()
