"""What arrives on the host of a measured gradient, against the gradient itself in float64."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.agent.step_message import StepMessage, pack_step
from rankscope.bus.gradient_part import measured_of
from rankscope.bus.groups import group_parameters
from rankscope.gradients.kernels.launch import Launching
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import fold
from rankscope.wrappers import transfer
from rankscope.wrappers.tap import LocalGradient
from rankscope.wrappers.transfer import begin_transfer
from support.interpreted import interpreter, launch_interpreted
from support.kernel_checks import needs_compiler

WIDTH = 101
NARROW = 13
SHAPES = {"embed.weight": (20, 8), "layers.0.up": (30, 8), "layers.0.down": (9,), "head.bias": (5,)}
GROUPS = group_parameters(SHAPES)
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make_gradient(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def measure(gradient):
    sketcher = Sketcher(CPU, GROUPS, WIDTH)
    totals = sketcher.new_totals()
    for name, part in gradient.items():
        sketcher.measure(name, part, totals)
    return totals


def hand_over(measured):
    handover = begin_transfer(measured, sketch_width=WIDTH, group_width=NARROW)
    assert handover.ready
    return read(handover)


def read(handover):
    message = StepMessage.unpack(b"".join(pack_step(0, 0.0, 0, handover.read().arrays)))
    numbers_1N, sketches_1N = message.numbers[None], message.sketches[None]
    found = measured_of(numbers_1N, sketches_1N, message.sizes, ())
    return SimpleNamespace(
        values={name: value for name, [value] in found.values.items()},
        group_norms_G=found.group_norms_wG[0],
        sketch_K=found.sketches_wK[0],
        group_sketches_GK=found.group_sketches_wGK[0],
        audit=found.audit_w[0] if found.audit_w else None,
        micro_norms=found.micro_norms_wM[0],
        changes_G=found.changes_wG[0],
    )


@pytest.fixture(scope="module")
def process():
    with interpreter() as process:
        yield process


@pytest.fixture(
    params=[pytest.param("native", marks=needs_compiler), "torch", "triton"], autouse=True
)
def way(request, monkeypatch):
    """Hand over as on a CPU, as on any device, and as on one with a kernel of its own."""
    if request.param == "native":
        assert transfer._is_compiled()
    else:
        monkeypatch.setattr(transfer, "_is_compiled", lambda: False)
    if request.param == "triton":
        process = request.getfixturevalue("process")
        monkeypatch.setattr(transfer, "_launches_on", lambda tensor: True)
        monkeypatch.setattr(transfer, "launch", partial(launch_interpreted, process))
        monkeypatch.setattr(transfer._gathering, "give_up", fail)


def fail(error):
    raise error


def norm(*tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def test_norms_largest_and_sketches():
    gradient = make_gradient()
    totals = measure(gradient)
    handed = hand_over(LocalGradient(totals))
    assert handed.values["grad_norm"] == pytest.approx(norm(*gradient.values()), rel=1e-6)
    assert handed.values["grad_max"] == max(float(part.abs().max()) for part in gradient.values())
    assert handed.values["grad_nonfinite"] == 0
    assert handed.values["grad_carried_over"] == 0
    assert math.isnan(handed.values["reduced_norm"])
    assert handed.micro_norms.shape == (0,)
    expected_G = [
        norm(gradient["embed.weight"]),
        norm(gradient["layers.0.up"], gradient["layers.0.down"]),
        norm(gradient["head.bias"]),
    ]
    np.testing.assert_allclose(handed.group_norms_G, expected_G, rtol=1e-6)
    np.testing.assert_allclose(handed.sketch_K, totals.sketches.sum(0), **CLOSE)
    np.testing.assert_allclose(handed.group_sketches_GK, fold(totals.sketches, NARROW), **CLOSE)
    assert handed.sketch_K.dtype == handed.group_sketches_GK.dtype == np.float32
    assert handed.audit is None


def test_the_sketch_of_a_group_that_is_one_section_travels_once():
    local, reduced = (measure(make_gradient(seed)) for seed in (0, 1))
    widths = {"sketch_width": WIDTH, "group_width": NARROW, "section_counts": (1,) * len(GROUPS)}
    apart = begin_transfer(LocalGradient(local, reduced), **widths, audit_width=NARROW - 2)
    whole = begin_transfer(LocalGradient(local, reduced), **widths, audit_width=NARROW)
    lengths = [len(handover.read().arrays["sketches"]) // 4 for handover in (apart, whole)]
    assert lengths == [
        WIDTH + len(GROUPS) * (NARROW + 2 * (NARROW - 2)),
        WIDTH + len(GROUPS) * 2 * NARROW,
    ]
    handed = [read(handover) for handover in (apart, whole)]
    np.testing.assert_array_equal(*(gradient.group_sketches_GK for gradient in handed))


def test_what_happened_between_micro_batches():
    totals = measure(make_gradient())
    changes_G = torch.linspace(0, 0.5, len(totals.squared_norms), dtype=torch.float64)
    squares_B2 = torch.tensor([[4.0, 4.0], [9.0, 36.0], [1.0, 1.0]], dtype=torch.float64)
    kept = torch.cat([squares_B2.flatten(), changes_G])
    handed = hand_over(LocalGradient(totals, accumulator_changes=kept))
    assert handed.changes_G.tolist() == changes_G.tolist()
    assert handed.values["accumulator_change"] == 0.5
    assert handed.values["accumulator_scale"] == 2
    assert handed.values["accumulator_micro"] == 2
    assert "accumulator_change" not in hand_over(LocalGradient(totals)).values


def test_a_gradient_that_is_not_finite_is_handed_over_as_it_is():
    gradient = make_gradient()
    gradient["layers.0.up"][3, :2] = math.inf
    handed = hand_over(LocalGradient(measure(gradient)))
    assert handed.values["grad_nonfinite"] == 2
    assert not math.isfinite(handed.values["grad_norm"])
    assert not math.isfinite(handed.values["grad_max"])
    finite = np.isfinite(handed.group_norms_G)
    assert finite.tolist() == [True, False, True]
    assert np.isfinite(handed.group_sketches_GK).all(axis=1).tolist() == finite.tolist()
    assert not np.isfinite(handed.sketch_K).all()


def test_a_kernel_that_fails_is_replaced_by_plain_torch_and_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(transfer, "_is_compiled", lambda: False)
    monkeypatch.setattr(transfer, "_launches_on", lambda tensor: True)
    monkeypatch.setattr(transfer, "_gathering", Launching("measurements are gathered"))
    monkeypatch.setattr(transfer, "launch", None)  # to call it raises
    gradient = make_gradient()
    with caplog.at_level("INFO", logger="rankscope"):
        for _ in range(2):
            handed = hand_over(LocalGradient(measure(gradient)))
            expected = norm(*gradient.values())
            assert handed.values["grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert len(caplog.records) == 1
