"""A trace: tensor by tensor, what a training held in one step, so that two runs can be compared."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.replicas import StateKind

TRACE_WIDTH = 61
"""Numbers in the sketch of a tensor: the distance of two of them is known to about 9 %."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Tensors of one worker in one step. N tensors, k numbers a sketch.

    Attributes:
        kinds: What each is of ``[N]``: a parameter after the step, a reduced gradient, …
        names: Its canonical name in the model ``[N]``.
        digests_N: Digest of its bits.
        norms_N: Its L2 norm.
        sketches_NK: Its linear sketch: that of a difference is the difference of sketches.
        initial: What the model held before this step, in the first one that is traced.
    """

    kinds: tuple[StateKind, ...]
    names: tuple[str, ...]
    digests_N: NDArray[np.int64]
    norms_N: NDArray[np.float64]
    sketches_NK: NDArray[np.float32]
    initial: "Trace | None" = None
