"""What the reduction should have returned, told from norms and cosines alone.

For W gradients g_i with mean m:

    W^2 |m|^2  =  sum_i |g_i|^2  +  sum_{i != j} g_i . g_j

and the last sum is ``cosine_weighted * sum_{i != j} |g_i| |g_j|``. With cosines from sketches of
width k the norm of the mean is known to about ``sqrt(2/k)`` of it, 2 % for k = 4,093, as long as
the gradients do not oppose each other.
"""

import math

from rankscope.core.arrays import Floats

LEAST_SHARE = 0.25
"""Of ``sum |g_i|^2``: where ``W^2 |m|^2`` is smaller, gradients oppose each other too much."""


def norm_of_mean(norms_W: Floats, cosine_weighted: float) -> float:
    """Return the norm of the mean of W gradients.

    Args:
        norms_W: Their norms.
        cosine_weighted: Their mean cosine, weighted by the products of norms.

    Returns:
        The norm; NaN where it cannot be told.
    """
    if len(norms_W) < 2 or not math.isfinite(cosine_weighted):
        return float("nan")
    scale = float(norms_W.max())
    if not 0 < scale < math.inf or norms_W.min() < 0:
        return float("nan")
    scaled_W = norms_W / scale
    squares = float((scaled_W * scaled_W).sum())
    products = float(scaled_W.sum()) ** 2 - squares
    total = squares + cosine_weighted * products
    if total < LEAST_SHARE * squares:
        return float("nan")
    return scale * math.sqrt(total) / len(norms_W)


def clip_limit(reduced_norm: float, cosine_mean: float, num_workers: int) -> float:
    """Return the length that all W gradients had when they were reduced, if all had the same.

    Unit vectors with mean cosine c have a mean of norm ``sqrt((1 + (W - 1) c) / W)``.

    Args:
        reduced_norm: Norm of the reduced gradient.
        cosine_mean: Mean cosine of the local gradients.
        num_workers: W.

    Returns:
        The common length; NaN where it cannot be told.
    """
    share = (1 + (num_workers - 1) * cosine_mean) / num_workers
    if not math.isfinite(share) or share * num_workers < LEAST_SHARE:
        return float("nan")
    return reduced_norm / math.sqrt(share)
