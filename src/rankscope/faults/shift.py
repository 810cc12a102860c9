"""How far a worker stands apart in a recorded run, in standard deviations."""

import numpy as np

from rankscope import Run
from rankscope.core.arrays import Floats

SIGNALS = ("loss", "grad_norm", "cosine_rest")
_FEWEST_OTHERS = 2


def lasting_shift(run: Run, worker: int, start: int) -> float | None:
    """Return the largest mean shift of one worker against the others, over the signals.

    In each signal, ``|mean_t (x_t - mean of the others_t)| / s``, where s is the standard
    deviation of the others around their mean of the same step, pooled over steps.

    Args:
        run: A recorded run.
        worker: Rank of the worker.
        start: First step that counts.

    Returns:
        The shift in standard deviations; None when there are fewer than two others, or nothing
        was measured.

    Raises:
        RunError: A file of the run cannot be read.
    """
    sizes = []
    for name in SIGNALS:
        steps_T, values_TW = run.per_worker(name)
        size = _shift(values_TW[steps_T >= start], worker)
        if size is not None:
            sizes.append(size)
    return max(sizes, default=None)


def _shift(values_TW: Floats, worker: int) -> float | None:
    values_TW = values_TW[np.isfinite(values_TW).all(axis=1)]
    others_TV = np.delete(values_TW, worker, axis=1)
    if not len(values_TW) or others_TV.shape[1] < _FEWEST_OTHERS:
        return None
    spread = float(np.sqrt(others_TV.var(axis=1, ddof=1).mean()))
    distance = float((values_TW[:, worker] - others_TV.mean(axis=1)).mean())
    return abs(distance) / spread if spread > 0 else None
