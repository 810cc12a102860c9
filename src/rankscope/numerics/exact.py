"""What sums are held against: float64 for every element, and exact sums for a sample of them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.rounding import ulp_distance

MAX_EXACT = 4096


@dataclass(frozen=True, slots=True)
class Reference:
    """How far float64 is from correctly rounded sums.

    Attributes:
        num_exact: Elements that were summed exactly.
        relative: Error of float64 in Euclidean norm over these elements, relative to the sums.
        ulp: Its largest error in units in the last place of float64.
    """

    num_exact: int
    relative: float
    ulp: float

    def to_json(self) -> dict[str, Any]:
        """Return the values by name."""
        return {"num_exact": self.num_exact, "relative": self.relative, "ulp": self.ulp}


def sums_in_float64(gradients_WN: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sums over workers ``[N]``, added one after the other in float64."""
    return np.asarray(gradients_WN.sum(axis=0, dtype=np.float64))


def exact_sums(gradients_WN: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the correctly rounded sums over workers ``[N]``: as if added without any error.

    Source: Shewchuk, "Adaptive precision floating-point arithmetic and fast robust geometric
    predicates" (1997), which :func:`math.fsum` implements.
    """
    columns = gradients_WN.T.astype(np.float64).tolist()
    return np.array([math.fsum(column) for column in columns], dtype=np.float64)


def check_reference(gradients_WN: NDArray[np.float32], max_exact: int = MAX_EXACT) -> Reference:
    """Compare float64 with exact sums on elements spread evenly over the buffer.

    Args:
        gradients_WN: Finite gradients.
        max_exact: Elements to sum exactly, at most.
    """
    num_elements = gradients_WN.shape[1]
    chosen = np.unique(np.linspace(0, num_elements - 1, min(max_exact, num_elements)).astype(int))
    sample = gradients_WN[:, chosen]
    exact, approximate = exact_sums(sample), sums_in_float64(sample)
    size = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(approximate - exact))
    return Reference(
        num_exact=len(chosen),
        relative=error / size if size else (0.0 if error == 0 else math.inf),
        ulp=float(ulp_distance(exact, approximate, "float64").max(initial=0.0)),
    )
