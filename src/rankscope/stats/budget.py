"""The false-alarm budget of all statistical detectors, and the e-detectors that spend it.

``R_t = (1 + R_{t−1})·e_t`` sums, over all steps at which a fault may have begun, the evidence
since then. When each e_t has an expectation of at most 1 given the past, ``R_t − t`` is a
supermartingale, and by Doob's inequality R reaches c within N steps with a probability of at most
N/c (Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change
detection", 2022; the statistic is Shiryaev's and Roberts').

The budget: a healthy run of N steps raises any statistical finding with a probability of at most
``N / THRESHOLD``. Each family of detectors owns a share s of it: its e-detector M, whose
expectation after n healthy steps is at most n, alarms at ``THRESHOLD / s``. The shares sum to 1,
so that the probabilities of all families sum to the promise.
"""

import math
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import numpy as np

from rankscope.stats.arrays import Floats32
from rankscope.stats.state import Stateful

_LARGEST = np.float32(1e30)
_ONE = np.float32(1)


class ShiryaevRoberts(Stateful):
    """An array of e-detectors.

    Args:
        shape: Their shape.

    Attributes:
        evidence: R of each, 0 at first, float32.
        age: How many steps ago the fault began, this step included: the mean over all beginnings
            in proportion to their evidence. It counts steps in which the detector was fed.

    Example:
        >>> detector = ShiryaevRoberts(2)
        >>> for _ in range(3):
        ...     detector.observe(np.array([1.0, 2.0], np.float32))
        >>> detector.evidence.tolist()  # 3 steps of nothing; ((0 + 1)·2 + 1)·2 …
        [3.0, 14.0]
    """

    def __init__(self, *shape: int) -> None:
        self.evidence = np.zeros(shape, np.float32)
        self.age = np.zeros(shape, np.float32)

    def observe(self, e: Floats32, at: Any = ...) -> None:
        """Add the e-values of a step, of the shape of ``evidence[at]``, to these detectors."""
        evidence = self.evidence[at]
        age = self.age[at]  # in place where `at` is a slice
        age *= evidence
        evidence += _ONE
        age /= evidence
        age += _ONE
        evidence *= e
        np.minimum(evidence, _LARGEST, out=evidence)
        if evidence.base is not self.evidence:
            self.evidence[at] = evidence
            self.age[at] = age

    def restart(self, at: Any) -> None:
        """Forget all evidence of some detectors; their part of the budget stays spent."""
        self.evidence[at] = 0
        self.age[at] = 0


THRESHOLD = 1e6

OUTLIERS = 0.8
"""Share of the search for workers that differ from the others, half totals and half groups."""

AMOUNTS = 0.05
"""Share of the search for workers whose amount of data differs."""

ROLLOUTS = 0.05
"""Share of the search for workers whose rollouts do not come from their trainer."""

PAIRS = 0.05
"""Share of the search for workers that resemble each other too much."""

SAMPLING = 0.05
"""Share of the comparison of workers with what sampling explains."""

assert math.fsum([OUTLIERS, AMOUNTS, ROLLOUTS, PAIRS, SAMPLING]) <= 1.0

FAR_BELOW = 0.99
"""Part of a level below which a bound on the evidence decides; rounding changes sums far less."""


def alarm_level(share: float) -> float:
    """Return the value of an e-detector at which a family with this share of the budget alarms.

    Example:
        >>> alarm_level(PAIRS)
        20000000.0
    """
    return THRESHOLD / share


def false_alarm_bound(num_steps: int) -> float:
    """Return the largest probability that a healthy run of so many steps raises any finding.

    Example:
        >>> false_alarm_bound(10_000)
        0.01
    """
    return min(1.0, num_steps / THRESHOLD)


def bound_in_words(num_steps: int) -> str:
    """Return the bound with one digit, rounded up, so that it stays a bound.

    >>> bound_in_words(300), bound_in_words(14_900)
    ('0.0003', '0.02')
    """
    bound = Context(prec=1, rounding=ROUND_CEILING).divide(Decimal(num_steps), Decimal(THRESHOLD))
    return f"{min(1.0, float(bound)):.1g}"
