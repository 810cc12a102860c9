"""How much a label token weighs in the step, from token counts and the multipliers of the losses.

A unit (a worker, or a micro-batch) with a mean loss over n tokens, multiplied by m before
backward, gives each of its tokens the weight m/n. Legend: R groups of units that one step adds up,
U units in a group.
"""

from collections.abc import Sequence

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.state import Stateful

_EQUAL = 1e-3
_PROPORTIONAL = 1e-2
_ENOUGH, _SLOPE = 0.2, 0.5


def log_spread(scales_RU: Floats, tokens_RU: Floats) -> Floats:
    """Return the logarithm of the largest weight of a token over the smallest ``[R]``.

    Args:
        scales_RU: Multipliers m; NaN where unknown.
        tokens_RU: Tokens n; NaN where unknown. Units without tokens are left out.

    Returns:
        About 0 where m grows with n. NaN where fewer than two units are known, or where the
        multipliers differ and do not follow the tokens: then they weigh something else.

    Example:
        >>> equal, doubled = [1.0, 1.0], [2.0, 1.0]
        >>> spread = log_spread(np.array([equal, doubled]), np.array([[10.0, 20.0], [8.0, 4.0]]))
        >>> np.exp(spread).round(6).tolist()
        [2.0, 1.0]
    """
    sizes_RU = np.abs(scales_RU)
    known_RU = np.isfinite(sizes_RU) & (sizes_RU > 0) & np.isfinite(tokens_RU) & (tokens_RU > 0)
    log_scales_RU = np.log(np.where(known_RU, sizes_RU, 1.0))
    log_weights_RU = log_scales_RU - np.log(np.where(known_RU, tokens_RU, 1.0))
    spread_R = _range(log_weights_RU, known_RU)
    constant_R = _range(log_scales_RU, known_RU) <= _EQUAL
    judged_R = (known_RU.sum(axis=1) >= 2) & (constant_R | (spread_R <= _PROPORTIONAL))
    return np.where(judged_R, spread_R, np.nan)


def are_alike(values_U: Floats) -> bool:
    """Return whether all numbers are known, and equal but for rounding."""
    sizes_U = np.abs(values_U)
    return bool(np.isfinite(sizes_U).all() and np.ptp(sizes_U) <= _EQUAL * sizes_U.max(initial=0))


def follow_tokens(scales_U: Floats, tokens_U: Floats) -> bool:
    """Return whether multipliers are in proportion to tokens that are all known."""
    if not (np.isfinite(tokens_U).all() and (tokens_U > 0).all()):
        return False
    spread = float(log_spread(scales_U[None], tokens_U[None])[0])
    return spread <= _PROPORTIONAL


def as_matrix(parts: Sequence[Floats]) -> Floats:
    """Return arrays of different lengths as the rows of a matrix, filled up with NaN."""
    matrix = np.full((len(parts), max(map(len, parts), default=0)), np.nan)
    for row, part in zip(matrix, parts, strict=True):
        row[: len(part)] = part
    return matrix


class TokenSums(Stateful):
    """Tells losses that are sums over tokens from means over tokens.

    Some trainers divide the sum over a worker's tokens by the number of *all* workers' tokens.
    Such a loss grows with the worker's tokens, and weighs all tokens alike without any help from
    the multipliers. The slope of log loss against log tokens within a step is near 1 then, and
    near 0 for means.
    """

    def __init__(self) -> None:
        self._xx = 0.0
        self._xy = 0.0

    def add(self, losses_RU: Floats, tokens_RU: Floats) -> None:
        """Take the losses of units, and their tokens; NaN where unknown."""
        known_RU = (losses_RU > 0) & (tokens_RU > 0) & np.isfinite(losses_RU + tokens_RU)
        x_RU = _centred(np.log(np.where(known_RU, tokens_RU, 1.0)), known_RU)
        y_RU = _centred(np.log(np.where(known_RU, losses_RU, 1.0)), known_RU)
        self._xx += float(np.sum(x_RU * x_RU))
        self._xy += float(np.sum(x_RU * y_RU))

    @property
    def found(self) -> bool:
        """Whether the losses are sums over tokens, as far as one can tell."""
        return self._xx >= _ENOUGH and self._xy > _SLOPE * self._xx


def _range(values_RU: Floats, known_RU: np.typing.NDArray[np.bool_]) -> Floats:
    highest_R = np.max(np.where(known_RU, values_RU, -np.inf), axis=1, initial=-np.inf)
    lowest_R = np.min(np.where(known_RU, values_RU, np.inf), axis=1, initial=np.inf)
    spread_R: Floats = highest_R - lowest_R
    return spread_R


def _centred(values_RU: Floats, known_RU: np.typing.NDArray[np.bool_]) -> Floats:
    """Return values minus the mean of their group, 0 where unknown."""
    number_R1 = np.maximum(known_RU.sum(axis=1, keepdims=True), 1)
    mean_R1 = np.sum(np.where(known_RU, values_RU, 0.0), axis=1, keepdims=True) / number_R1
    return np.where(known_RU, values_RU - mean_R1, 0.0)
