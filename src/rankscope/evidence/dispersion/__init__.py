"""How far losses and local gradients of the workers lie apart."""

from rankscope.bus.columns import Compared, DType, Source, Table, Tail, declare
from rankscope.bus.evidence import Evidence

# fmt: off
COLUMNS = (
    *declare(
        Table.STEPS,
        ("loss_std", DType.FLOAT, "nats/token", Source.DERIVED, Tail.BOTH, "loss dispersion: population std over workers"),
        ("loss_range", DType.FLOAT, "nats/token", Source.DERIVED, Tail.BOTH, "largest minus smallest loss over workers"),
        ("loss_std_expected", DType.FLOAT, "nats/token", Source.DERIVED, Tail.NONE, "loss std that sampling alone would give, from the spread within workers"),
        ("grad_norm_mean", DType.FLOAT, "", Source.DERIVED, Tail.NONE, "mean of the workers' local gradient norms"),
        ("grad_norm_std", DType.FLOAT, "", Source.DERIVED, Tail.BOTH, "gradient-norm dispersion: population std over workers"),
        ("cosine_mean", DType.FLOAT, "", Source.DERIVED, Tail.BOTH, "gradient-direction consistency: mean cosine over pairs of workers"),
        ("cosine_weighted", DType.FLOAT, "", Source.DERIVED, Tail.BOTH, "mean cosine over pairs, weighted by the product of their norms"),
        ("cosine_min", DType.FLOAT, "", Source.DERIVED, Tail.LOW, "smallest cosine over pairs of workers"),
        ("directions_undefined", DType.INT, "workers", Source.DERIVED, Tail.HIGH, "workers whose gradient is zero or not finite and so has no direction"),
    ),
    *declare(
        Table.WORKERS,
        ("grad_norm", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "L2 norm of the local gradient, before the reduction", Compared("gradient norm")),
        ("grad_norm_estimated", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether grad_norm is an estimate, since the gradient was only seen in parts: ZeRO 2 and 3 or order_free with accumulation"),
        ("grad_max", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "largest magnitude of an element of the local gradient"),
        ("grad_nonfinite", DType.INT, "elements", Source.LOCAL, Tail.HIGH, "elements of the local gradient that are infinite or NaN"),
        ("cosine_rest", DType.FLOAT, "", Source.DERIVED, Tail.LOW, "cosine between this worker's gradient and the sum of all others'", Compared("direction", relative=False)),
    ),
    *declare(
        Table.MICRO,
        ("grad_norm", DType.FLOAT, "", Source.SEQUENCE, Tail.NONE, "L2 norm of the micro-batch's own local gradient; all but the first of a step are estimates"),
    ),
    *declare(
        Table.PAIRS,
        ("cosines", DType.FLOATS, "", Source.DERIVED, Tail.NONE, "cosines of all pairs i < j, row by row (W <= 64)"),
    ),
    *declare(
        Table.GROUPS,
        ("grad_norm", DType.FLOAT, "", Source.SEQUENCE, Tail.BOTH, "L2 norm of the group's local gradient", Compared("gradient norm")),
        ("cosine_rest", DType.FLOAT, "", Source.DERIVED, Tail.LOW, "cosine between the group's local gradient and the sum of all other workers'", Compared("direction", relative=False)),
    ),
)
# fmt: on

EVIDENCE = Evidence("dispersion", __name__, COLUMNS)
