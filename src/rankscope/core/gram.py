"""The exact inner products of all workers' gradients, from the parts that each worker holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sum_shares(packed_WT: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the Gram matrix ``[W, W]`` of the local gradients from all workers' packed shares.

    Rows and columns of workers whose gradient holds an infinity or NaN are NaN.

    Args:
        packed_WT: Upper triangle with diagonal of each worker's share, row by row.
    """
    num_workers = len(packed_WT)
    gram_WW = np.zeros((num_workers, num_workers))
    rows, columns = np.triu_indices(num_workers)
    with np.errstate(invalid="ignore"):
        gram_WW[rows, columns] = packed_WT.sum(axis=0, dtype=np.float64)
    gram_WW[columns, rows] = gram_WW[rows, columns]
    broken_W = ~np.isfinite(gram_WW.diagonal())
    gram_WW[broken_W, :] = np.nan
    gram_WW[:, broken_W] = np.nan
    return gram_WW
