"""Shiryaev–Roberts e-detectors: many at once, each with the time since when it thinks so.

``R_t = (1 + R_{t−1})·e_t`` sums, over all steps at which a fault may have begun, the evidence
since then. When each e_t has an expectation of at most 1 given the past, ``R_t − t`` is a
supermartingale, and by Doob's inequality R reaches c within N steps with a probability of at most
N/c (Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change
detection", 2022; the statistic is Shiryaev's and Roberts').
"""

from typing import Any

import numpy as np

from rankscope.core.arrays import Floats32
from rankscope.core.state import Stateful

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
    """

    def __init__(self, *shape: int) -> None:
        self.evidence = np.zeros(shape, np.float32)
        self.age = np.zeros(shape, np.float32)

    def observe(self, e: Floats32, at: Any = ...) -> None:
        """Take the e-values of one step.

        Args:
            e: Of the shape of ``evidence[at]``.
            at: Which of the detectors are fed; all by default.
        """
        evidence, age = self.evidence[at], self.age[at]  # in place where `at` is a slice
        age *= evidence
        evidence += _ONE
        age /= evidence
        age += _ONE
        evidence *= e
        np.minimum(evidence, _LARGEST, out=evidence)
        if evidence.base is not self.evidence:
            self.evidence[at], self.age[at] = evidence, age

    def restart(self, at: Any) -> None:
        """Forget all evidence of some detectors. What they have spent of the budget stays spent."""
        self.evidence[at] = 0
        self.age[at] = 0
