"""What is measured depends neither on torch's default dtype nor on its default device."""

import contextlib

import numpy as np
import pytest
import torch

from rankscope.bus.groups import group_parameters
from rankscope.evidence.canary.replay import project
from rankscope.evidence.loss.probe import LossMeter
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.sketch import DEFAULT_WIDTH, NormMeter, Sketcher
from rankscope.gradients.totals import fold, fold_signs
from rankscope.lab.reductions.accumulator import native_functions
from rankscope.wrappers import samples
from support.collected import to_arrays
from support.kernel_checks import CPU, SEED, WIDTH, random

GRADIENT = random(30 * WIDTH + 5)
LOSS = torch.tensor(2.5)
GROUPS = group_parameters(["weight"])
BATCH = torch.arange(60).reshape(3, 20)


@contextlib.contextmanager
def defaults(dtype=torch.float32, device=None):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def gradient_numbers():
    meters = [kind(CPU, GROUPS, WIDTH, SEED) for kind in (Sketcher, NormMeter, Sketcher, Sketcher)]
    for meter, waits in zip(meters[2:], (True, False), strict=True):
        meter._kernel = PlainKernel(CPU, WIDTH, period_signs(SEED), waits=waits)
        meter._native = None
    for meter in meters:
        totals = meter.new_totals()
        for _ in range(2):  # the second time, all is prepared
            meter.measure("weight", GRADIENT, totals)
        yield meter.kernel, *totals.tensors
    yield "accumulator", torch.tensor(native_functions.__wrapped__() is None, device=CPU)


def loss_numbers():
    losses = LossMeter(shifted=False)
    losses.give(2.34567, 12_345.0, factor=1.1)
    losses.give(LOSS, 12_345.0)
    losses.give([0.1, 0.2], [4097, 3])
    losses.see({"loss": LOSS}, {"labels": BATCH, "num_items_in_batch": 1_234_567.0})
    for arrays in to_arrays(losses.collect()[0]):
        yield "loss", *map(torch.from_numpy, arrays)


def other_numbers():
    for cached in (samples._weights, samples._weights_on_host, fold_signs):
        cached.cache_clear()
    wide = GRADIENT[None, :DEFAULT_WIDTH]
    yield "samples", samples.digest_inputs((BATCH,), {}), samples._weights(CPU)
    yield "sketches", fold(wide), fold(wide.double())
    yield "output", project(GRADIENT)


def all_numbers():
    found = [*gradient_numbers(), *loss_numbers(), *other_numbers()]
    return [(name, [each.numpy() for each in tensors]) for name, *tensors in found]


@pytest.mark.parametrize(
    "default", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}]
)
def test_the_numbers_are_those_under_the_usual_defaults(default):
    usual = all_numbers()
    with defaults(**default):
        numbers = all_numbers()
    assert [name for name, _ in numbers] == [name for name, _ in usual]
    for (name, found), (_, expected) in zip(numbers, usual, strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
            assert one.dtype == other.dtype
