"""How the distance of two runs grows over the steps, and where it jumps. P pairs of steps."""

import math

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.numerics.diff.parting import most_apart, spike
from rankscope.numerics.diff.result import Curve, Growth, Jump
from rankscope.numerics.diff.signals import Pair

LEAST_STEPS = 4
"""Known distances that a fit, or a trend before a jump, needs."""

JUMP = 300.0
"""A distance this many times beyond the trend is a jump.

Training amplifies differences: AdamW turns the rounding of a gradient near zero into a whole
learning rate. So the trend is the largest of all distances before, and the first steps after the
runs have parted, where this happens, never count.
"""


def curves_of(pair: Pair) -> tuple[Curve, ...]:
    """Return the relative distance of losses, reduced gradients and parameters over the steps."""
    steps = pair.alignment.steps_a
    one, other = pair.losses()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.sqrt(((one - other) ** 2).mean(axis=1))
        loss = np.where(apart == 0, 0.0, apart / np.abs(one).mean(axis=1))
        norm_a, norm_b = pair.steps_column("grad_norm_reduced")
        norms = np.where(norm_a == norm_b, 0.0, np.abs(norm_a - norm_b) / np.abs(norm_a))
    gradient = _traced(pair, "reduced")
    if np.isnan(gradient).all():
        gradient = norms
    found = [Curve("loss", steps, loss), Curve("gradient", steps, gradient)]
    found.append(Curve("parameters", steps, _traced(pair, "parameter")))
    return tuple(curve for curve in found if np.isfinite(curve.values).any())


def growth_of(curve: Curve) -> Growth | None:
    """Fit how a distance grows after it first differs from 0: by a factor per step, or a power.

    Returns:
        The better of both fits to the logarithms (least squares); None with fewer than four known
        distances.
    """
    known = np.flatnonzero(np.isfinite(curve.values) & (curve.values > 0))
    if len(known) < LEAST_STEPS:
        return None
    since = (curve.steps[known] - curve.steps[known[0]]).astype(float)
    logs = np.log(curve.values[known])
    rate, error_of_rate = _slope(since, logs)
    power, error_of_power = _slope(np.log(since + 1.0), logs)
    shape = "exponential" if error_of_rate < error_of_power else "power"
    if min(error_of_rate, error_of_power) > 0.98 * float(((logs - logs.mean()) ** 2).sum()):
        shape = "flat"
    return Growth(
        curve=curve.name,
        shape=shape,
        factor=math.exp(rate),
        exponent=power,
        first=float(curve.values[known[0]]),
        last=float(curve.values[known[-1]]),
        num_steps=len(known),
    )


def jump_of(pair: Pair, curves: tuple[Curve, ...]) -> Jump | None:
    """Return the first jump beyond the trend after two runs have parted; None without.

    A jump of a distance to hundreds of times all before, at least four steps after the parting; or
    a single element of a parameter that suddenly makes up the whole distance; or losses of one run
    alone that become infinite or NaN.
    """
    found = [jump for curve in curves if (jump := _jump_in(pair, curve)) is not None]
    spiked = _spike_in(pair)
    if spiked is not None:
        found.append(spiked)
    diverged = _divergence_in(pair, curves)
    if diverged is not None:
        found.append(diverged)
    return min(found, key=lambda jump: (jump.step, _ORDER.index(jump.curve)), default=None)


_ORDER = ("parameters", "gradient", "loss")


def _jump_in(pair: Pair, curve: Curve) -> Jump | None:
    highest, seen = 0.0, 0
    for at, value in enumerate(curve.values):
        if math.isnan(value) or value == 0:
            seen += seen > 0 and value == 0
            continue
        if seen >= LEAST_STEPS and highest > 0 and value > JUMP * highest and value > _floor(curve):
            kind = "reduced" if curve.name == "gradient" else "parameter"
            return _jump(pair, at, curve.name, highest, value, most_apart(pair.distance(at, kind)))
        highest, seen = max(highest, value), seen + 1
    return None


def _floor(curve: Curve) -> float:
    """Return the least distance that can be a jump: losses are told to 24 bits."""
    return 1e-5 if curve.name == "loss" else 0.0


def _spike_in(pair: Pair) -> Jump | None:
    """Return the first step in which one element makes up the distance, and did not before."""
    before, seen = "", 0
    last = 0.0
    for at in range(len(pair)):
        apart = pair.distance(at, "parameter")
        if apart is None or not apart.differs_N.any():
            continue
        name = spike(apart)
        if name and not before and seen >= LEAST_STEPS and apart.total > 4 * last:
            return _jump(pair, at, "parameters", last, apart.total, name)
        before, seen, last = name, seen + 1, max(last, apart.total)
    return None


def _divergence_in(pair: Pair, curves: tuple[Curve, ...]) -> Jump | None:
    found = pair.divergence()
    if found is None:
        return None
    values = next((curve.values for curve in curves if curve.name == "loss"), np.empty(0))
    known = values[: found[0]][np.isfinite(values[: found[0]])]
    return _jump(pair, found[0], "loss", float(known.max(initial=0.0)), math.inf, "")


def _jump(pair: Pair, at: int, curve: str, before: float, after: float, tensor: str) -> Jump:
    steps = pair.alignment
    return Jump(int(steps.steps_a[at]), int(steps.steps_b[at]), curve, before, after, tensor)


def _traced(pair: Pair, kind: str) -> Floats:
    values = np.full(len(pair), np.nan)
    for at in range(len(pair)):
        apart = pair.distance(at, kind)
        if apart is not None:
            total = apart.total if apart.differs_N.any() else 0.0
            values[at] = math.inf if math.isnan(total) else total
    return values


def _slope(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the slope of a least-squares line, and its sum of squared errors."""
    centred, apart = x - x.mean(), y - y.mean()
    slope = float((centred @ apart) / (centred @ centred))
    return slope, float(((apart - slope * centred) ** 2).sum())
