"""Noise of gradients from norms alone: within workers, between workers, and the noise scale.

A gradient over n units (micro-batches, or workers) is the true gradient G plus noise, whose
expected square falls as 1/n. From the mean square of single units, ``a``, and the square ``b`` of
the mean of all n of them follow, without bias,

    noise of a unit  tr Σ = (n·a − n·b) / (n − 1),     |G|² = (n·b − a) / (n − 1),

which is appendix A.1 of McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch
Training", 2018 (arXiv 1812.06162) with batches of 1 and n units. Their *simple noise scale*
``tr Σ / |G|²`` is the batch, in units, at which noise and gradient are equally long.

With one gradient per worker, ``a`` and ``b`` are all that the norm-weighted mean cosine knows:
with equal norms, cosine c and noise scale are ``(1 − c)/c`` of each other, and shared data give
noise 0. Only the micro-batches inside a worker tell what the noise should be.

All units count alike here; where micro-batches of unequal weight are averaged by weight, the
noise within workers is read a little too small.

Legend of shapes: W workers, M micro-batches of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.block_ratio import Estimate


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """What the norms of one step say about the noise of gradients; NaN where unknown.

    Attributes:
        between: Variance of the workers' gradients around their mean (trace, unbiased).
        within: The same as their micro-batches predict it, whatever the workers share.
        noise: tr Σ of one unit: of a micro-batch where these are known, else of a worker.
        signal: |G|², without bias, so possibly negative in a single step.
        units: How many units the reduced gradient averages.
    """

    between: float
    within: float
    noise: float
    signal: float
    units: int


def gradient_noise(
    norms_W: Floats, reduced_norm: float, micro_squares_W: Floats | None, num_micro: int
) -> GradientNoise:
    """Return the noise of one step.

    Args:
        norms_W: Norm of each worker's gradient, the mean of its micro-batches' ones.
        reduced_norm: Norm of the mean of the workers' gradients.
        micro_squares_W: Sum of the squared norms of each worker's micro-batches; None or NaN
            where unknown.
        num_micro: M, micro-batches of each worker; 1 when unknown or when workers differ in it.
    """
    with np.errstate(over="ignore"):
        squares_W = np.square(np.asarray(norms_W, np.float64))
    width, reduced = len(squares_W), reduced_norm * reduced_norm
    between, signal = _split(float(np.mean(squares_W)), reduced, width) if width > 1 else _UNKNOWN
    if num_micro < 2 or micro_squares_W is None:
        return GradientNoise(between, math.nan, between, signal, width)
    mean_square = float(np.mean(micro_squares_W)) / num_micro
    within, _ = _split(mean_square, float(np.mean(squares_W)), num_micro)
    if math.isnan(mean_square):
        return GradientNoise(between, math.nan, between, signal, width)
    noise, signal = _split(mean_square, reduced, width * num_micro)
    return GradientNoise(between, within / num_micro, noise, signal, width * num_micro)


def micro_squares(norms: Sequence[Floats]) -> tuple[Floats | None, int]:
    """Return the sums of the squared norms of each worker's micro-batches, and their number M.

    Returns:
        ``[W]`` and M; None and 1 when workers have one each, or not all as many.
    """
    num_micro = len(norms[0]) if norms else 0
    if num_micro < 2 or {len(worker) for worker in norms} != {num_micro}:
        return None, 1
    norms_WM = np.concatenate(norms).reshape(-1, num_micro)
    return np.einsum("wm,wm->w", norms_WM, norms_WM), num_micro


def noise_scale(inverse: Estimate) -> Estimate:
    """Return noise over signal, given signal over noise.

    The signal may be hidden in noise; its inverse would then have no finite interval. So the
    interval is that of signal over noise, turned round: without an upper end when the signal may
    be 0.
    """
    low, high = inverse.low, inverse.high
    return Estimate(
        value=1 / inverse.value if inverse.value > 0 else math.inf,
        error=math.nan,
        low=_turned(high),
        high=math.inf if low <= 0 else _turned(low),
    )


_UNKNOWN = (math.nan, math.nan)


def _split(one: float, mean_of_all: float, count: int) -> tuple[float, float]:
    """Return noise and signal from the mean square of a unit and the square of the mean."""
    noise = count * (one - mean_of_all) / (count - 1)
    return noise, (count * mean_of_all - one) / (count - 1)


def _turned(value: float) -> float:
    return 1 / value if value > 0 else value if math.isnan(value) else math.inf
