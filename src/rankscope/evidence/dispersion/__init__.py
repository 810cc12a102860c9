"""The dispersion of losses and local gradients over workers."""

from rankscope.bus.evidence import Compared, DType, Evidence, Source, Table, Tail, declare

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
        ("cosine_rest", DType.FLOAT, "", Source.DERIVED, Tail.LOW, "cosine between this worker's gradient and the sum of all others'", Compared("direction", relative=False)),
    ),
    *declare(
        Table.PAIRS,
        ("cosines", DType.FLOATS, "", Source.DERIVED, Tail.NONE, "cosines of all pairs i < j, row by row (W <= 64)"),
    ),
    *declare(
        Table.GROUPS,
        ("cosine_rest", DType.FLOAT, "", Source.DERIVED, Tail.LOW, "cosine between the group's local gradient and the sum of all other workers'", Compared("direction", relative=False)),
    ),
)
# fmt: on

EVIDENCE = Evidence("dispersion", __name__, COLUMNS)
