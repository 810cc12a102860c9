"""Norms and sketches of each worker's local gradient, and of the reduced one."""

import numpy as np

from rankscope.bus.evidence import Array, Compared, DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("grad_norm", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "L2 norm of the local gradient, before the reduction", Compared("gradient norm")),
        ("grad_norm_estimated", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether grad_norm is an estimate, since the gradient was only seen in parts: ZeRO 2 and 3 or order_free with accumulation"),
        ("grad_max", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "largest magnitude of an element of the local gradient"),
        ("grad_nonfinite", DType.INT, "elements", Source.LOCAL, Tail.HIGH, "elements of the local gradient that are infinite or NaN"),
        ("grad_carried_over", DType.BOOL, "", Source.LOCAL, Tail.HIGH, "whether the gradient was not zeroed before the step: then it is not measured"),
        ("reduced_norm", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "L2 norm of the part of the reduced gradient that this worker holds, as of the workers' mean"),
        ("summed_workers", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "how many workers' gradients the reduction adds up: 1 for their mean; null if unknown, as where a loop clips what it reduces"),
    ),
    *declare(
        Table.MICRO,
        ("grad_norm", DType.FLOAT, "", Source.SEQUENCE, Tail.NONE, "L2 norm of the micro-batch's own local gradient; all but the first of a step are estimates"),
    ),
    *declare(
        Table.GROUPS,
        ("grad_norm", DType.FLOAT, "", Source.SEQUENCE, Tail.BOTH, "L2 norm of the group's local gradient", Compared("gradient norm")),
    ),
)
# fmt: on

ARRAYS = (
    Array("numbers", np.float64, bulk=True),  # see bus.gradient_part; empty where not valid
    Array("sizes", np.int64, bulk=True),  # sizes of the parts of numbers and sketches
    Array("sketches", np.float32, bulk=True),
)

EVIDENCE = Evidence("gradient", __name__, COLUMNS, ARRAYS)
