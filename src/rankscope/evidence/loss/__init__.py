"""The local loss: its value, its label tokens, its multiplier before backward."""

import numpy as np

from rankscope.bus.evidence import (
    Array,
    Compared,
    Compares,
    DType,
    Evidence,
    Source,
    Table,
    Tail,
    declare,
)

# fmt: off
COLUMNS = (
    *declare(
        Table.STEPS,
        ("loss_mean", DType.FLOAT, "nats/token", Source.DERIVED, Tail.NONE, "mean of the workers' losses, each weighted as in the reduction: what dashboards show"),
    ),
    *declare(
        Table.WORKERS,
        ("loss", DType.FLOAT, "nats/token", Source.LOCAL, Tail.BOTH, "local loss per label token, before averaging; micro-batches count as they do in the gradient", Compared("loss", observed=False)),
        ("loss_weight", DType.FLOAT, "tokens", Source.LOCAL, Tail.NONE, "label tokens behind the loss, or the weight that was given", Compared("label tokens", observed=False, by=Compares.AMOUNTS)),
        ("loss_divided", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether the training sums its loss over label tokens and divides it by those of all workers, as all workers' counts prove"),
        ("loss_sem", DType.FLOAT, "nats/token", Source.LOCAL, Tail.NONE, "standard error of the local loss, from its micro-batches or samples"),
        ("grad_scale", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "multiplier of the loss before backward (scaler, accumulation), summed over micro-batches; its median over workers is undone in all gradient columns"),
        ("nonfinite", DType.BOOL, "", Source.LOCAL, Tail.HIGH, "whether the local loss or gradient holds an infinity or NaN"),
    ),
    *declare(
        Table.MICRO,
        ("loss", DType.FLOAT, "nats/token", Source.SEQUENCE, Tail.NONE, "local loss of the micro-batch per label token"),
        ("loss_weight", DType.FLOAT, "tokens", Source.SEQUENCE, Tail.NONE, "label tokens in the micro-batch"),
        ("loss_scale", DType.FLOAT, "", Source.SEQUENCE, Tail.NONE, "multiplier of the micro-batch's loss before backward"),
    ),
)
# fmt: on

ARRAYS = (
    Array("losses_U", np.float64),  # of all micro-batches, one after the other, in units
    Array("weights_U", np.float64),  # label tokens behind each, NaN if unknown
    Array("units_M", np.int64),  # how many units each micro-batch has
    Array("multipliers_M", np.float64),  # multiplier of each loss before backward
    # If all losses are sums over label tokens: number of tokens, divisor of the sum, mean, and
    # multiplier of the mean before backward.
    Array("sums_M4", np.float64),
)

EVIDENCE = Evidence("loss", __name__, COLUMNS, arrays=ARRAYS)
