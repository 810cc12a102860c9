"""Exact digests of parameters, buffers, optimizer state and gradients, which should agree."""

import numpy as np

from rankscope.bus.evidence import Array, DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("replica", DType.INT, "", Source.LOCAL, Tail.NONE, "workers with equal numbers hold the same parameters and optimizer state; null where these have one owner each"),
        ("state_layout", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of names, shapes and types of parameters, buffers and optimizer state"),
        ("param_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the step's slot of parameters, after the step; null where each has one owner"),
        ("buffer_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the step's slot of buffers, before its first forward pass"),
        ("optimizer_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the optimizer's state for the step's slot of parameters, after the step"),
        ("reduced_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the step's slot of gradients, right after the reduction"),
        ("applied_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the same gradients when optimizer.step was called"),
    ),
    *declare(
        Table.DIGESTS,
        ("digest", DType.INT, "", Source.SEQUENCE, Tail.NONE, "digest of its bits on this worker; of a role, its bits; of passes, the number of changes; of a number, the number or its bits"),
        ("unchanged", DType.BOOL, "", Source.SEQUENCE, Tail.NONE, "for a reduced gradient: whether the reduction left the local gradient's bits as they were; for an unchanged parameter: whether it is unchanged still; of passes and parameters: whether it is a frozen parameter; of counts: whether they began at 0"),
    ),
    *declare(
        Table.TRACES,
        ("digest", DType.INT, "", Source.DERIVED, Tail.NONE, "digest of its bits"),
        ("norm", DType.FLOAT, "", Source.DERIVED, Tail.NONE, "its L2 norm; null for an optimizer's state"),
        ("sketch", DType.FLOATS, "", Source.DERIVED, Tail.NONE, "its linear sketch, 61 numbers, none without a finite norm: the difference of two runs' sketches is the sketch of the difference"),
    ),
)
# fmt: on

ARRAYS = (
    Array("digests_D", np.int64),  # of what should be equal on other workers
    Array("unchanged_D", np.uint8),  # of reduced gradients: whether the local bits are still there
    Array("traced_digests_N", np.int64),  # of traced tensors, beside norms and sketches
    Array("traced_norms_N", np.float64),
    Array("traced_sketches", np.float32),
)

FROZEN = "frozen"
"""Key of the digests of frozen modules beside the watched model."""

EVIDENCE = Evidence("state", __name__, COLUMNS, arrays=ARRAYS, held=FROZEN)
