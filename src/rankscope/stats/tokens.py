"""How much a label token weighs in a step.

A unit (a worker, or a micro-batch) with a mean loss over n tokens, multiplied by m before backward,
gives each of its tokens the weight m/n.

Legend of shapes: R groups of units that one step adds up, U units in a group.
"""

import math
from collections.abc import Sequence

import numpy as np

from rankscope.stats.arrays import Bools, Floats
from rankscope.stats.state import Stateful

IGNORED_LABEL = -100
"""The label of a token that does not count in a loss, as torch's ``cross_entropy`` has it."""

_EQUAL = 1e-3
_PROPORTIONAL = 1e-2
_ENOUGH = 0.2
_SLOPE = 0.5


def log_spread(scales_RU: Floats, tokens_RU: Floats) -> Floats:
    """Return the logarithm of the largest weight of a token over the smallest ``[R]``.

    It is about 0 where the multipliers grow with the tokens. NaN where fewer than two units are
    known, or where the multipliers differ and do not follow the tokens: then they weigh something
    else. Units without tokens are left out.

    Example:
        >>> equal, doubled = [1.0, 1.0], [2.0, 1.0]
        >>> spread = log_spread(np.array([equal, doubled]), np.array([[10.0, 20.0], [8.0, 4.0]]))
        >>> np.exp(spread).round(6).tolist()
        [2.0, 1.0]
    """
    both = np.array([np.abs(scales_RU), tokens_RU])
    known_RU: Bools = np.logical_and.reduce((both > 0) & (both < np.inf))
    if not known_RU.any():
        return np.full(len(known_RU), np.nan)
    log_scales_RU, log_tokens_RU = np.log(np.where(known_RU, both, 1.0))
    spread_R = _range(log_scales_RU - log_tokens_RU, known_RU)
    constant_R = _range(log_scales_RU, known_RU) <= _EQUAL
    judged_R = (known_RU.sum(axis=1) >= 2) & (constant_R | (spread_R <= _PROPORTIONAL))
    return np.where(judged_R, spread_R, np.nan)


def are_alike(values_U: Floats) -> bool:
    """Return whether all numbers are known, and equal but for rounding.

    Example:
        >>> are_alike(np.array([2.0, 2.0001])), are_alike(np.array([2.0, 2.1]))
        (True, False)
    """
    sizes_U = np.abs(values_U)
    largest = float(sizes_U.max())
    return math.isfinite(largest) and largest - float(sizes_U.min()) <= _EQUAL * largest


def follow_tokens(scales_U: Floats, tokens_U: Floats) -> bool:
    """Return whether multipliers are in proportion to tokens that are all known.

    Example:
        >>> follow_tokens(np.array([1.0, 2.0]), np.array([10.0, 20.0]))
        True
    """
    if not (np.isfinite(tokens_U).all() and (tokens_U > 0).all()):
        return False
    spread = float(log_spread(scales_U[None], tokens_U[None])[0])
    return spread <= _PROPORTIONAL


def as_matrix(parts: Sequence[Floats]) -> Floats:
    """Return arrays of different lengths as the rows of a matrix, filled up with NaN.

    Example:
        >>> as_matrix([np.array([1.0]), np.array([2.0, 3.0])]).tolist()
        [[1.0, nan], [2.0, 3.0]]
    """
    lengths = {len(part) for part in parts}
    if len(lengths) == 1:
        return np.concatenate(parts, dtype=np.float64).reshape(len(parts), -1)
    matrix = np.full((len(parts), max(lengths, default=0)), np.nan)
    for row, part in zip(matrix, parts, strict=True):
        row[: len(part)] = part
    return matrix


def token_products(losses_RU: Floats, tokens_RU: Floats) -> Floats:
    """Return the sums of x² and of xy in each group ``[R, 2]``.

    x is the log of a unit's tokens and y that of its loss, each minus its group's mean.

    Example:
        >>> token_products(np.array([[np.e, 1.0]]), np.array([[np.e, 1.0]])).tolist()  # ±1/2 each
        [[0.5, 0.5]]
    """
    both = np.array([tokens_RU, losses_RU])
    known_RU = (both > 0).all(axis=0) & np.isfinite(tokens_RU + losses_RU)
    logs = np.log(np.where(known_RU, both, 1.0))  # 0 where unknown
    number_R1 = np.maximum(known_RU.sum(axis=1, keepdims=True), 1)
    logs -= logs.sum(axis=2, keepdims=True) / number_R1
    x_RU, y_RU = np.where(known_RU, logs, 0.0)
    return np.stack([(x_RU * x_RU).sum(axis=1), (x_RU * y_RU).sum(axis=1)], axis=1)


class TokenSums(Stateful):
    """Detects losses that are sums over tokens, not means.

    Some trainers divide the sum over a worker's tokens by the number of *all* workers' tokens.
    Such a loss grows with the worker's tokens, and weighs all tokens alike without any help from
    the multipliers. The slope of log loss against log tokens within a step is near 1 then, and
    near 0 for means.

    Example:
        >>> sums, means = TokenSums(), TokenSums()
        >>> sums.add(np.array([[20.0, 40.0]]), tokens := np.array([[100.0, 200.0]]))
        >>> means.add(np.array([[0.2, 0.21]]), tokens)
        >>> sums.found, means.found
        (True, False)
    """

    def __init__(self) -> None:
        self._xx = 0.0
        self._xy = 0.0

    def add(self, losses_RU: Floats, tokens_RU: Floats) -> None:
        """Add the losses of units, and their tokens; NaN where unknown."""
        self.add_products(token_products(losses_RU, tokens_RU).sum(axis=0).tolist())

    def add_products(self, products: Sequence[float]) -> None:
        """Add the sums of x² and xy of a step, see :func:`token_products`."""
        self._xx += products[0]
        self._xy += products[1]

    @property
    def found(self) -> bool:
        """Whether the losses are sums over tokens, as far as the steps show."""
        return self._xx >= _ENOUGH and self._xy > _SLOPE * self._xx


def _range(values_RU: Floats, known_RU: Bools) -> Floats:
    """Return the largest minus the smallest known value of each group; -inf without any."""
    if known_RU.all():
        return np.asarray(values_RU.max(axis=1) - values_RU.min(axis=1))
    highest_R = np.where(known_RU, values_RU, -np.inf).max(axis=1, initial=-np.inf)
    lowest_R = np.where(known_RU, values_RU, np.inf).min(axis=1, initial=np.inf)
    return np.asarray(highest_R - lowest_R)
