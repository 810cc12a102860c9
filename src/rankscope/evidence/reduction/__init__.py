"""The reduction of the local gradients, up to the optimizer's call."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.STEPS,
        ("grad_norm_reduced", DType.FLOAT, "", Source.DERIVED, Tail.NONE, "L2 norm of the reduced gradient, before any clipping: what dashboards show"),
        ("reduction_residual", DType.FLOAT, "", Source.DERIVED, Tail.HIGH, "relative distance of the reduced gradient from the mean of the workers' gradients"),
    ),
    *declare(
        Table.WORKERS,
        ("grad_left_over", DType.BOOL, "", Source.LOCAL, Tail.HIGH, "whether the step's first backward pass added to a gradient that the optimizer had applied before"),
        ("grad_set_aside", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether a gradient was reduced and taken away in a step before, since the last update: the optimizer may get a gradient made of both, as in PCGrad"),
        ("accumulator_change", DType.FLOAT, "", Source.LOCAL, Tail.HIGH, "relative change of the accumulated gradient's norm from the end of one micro-batch's backward pass to the beginning of the next, the largest of the step; DDP with no_sync, FSDP2 (of this rank's shards where each pass reduces), DeepSpeed (of shards under ZeRO 2 and 3), no wrapper"),
        ("accumulator_scale", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "that norm at the beginning over that at the end: 1 if nothing happened, 0 if it was reset"),
        ("accumulator_micro", DType.INT, "", Source.LOCAL, Tail.NONE, "the first micro-batch before which it changed most, from 0"),
        ("unreduced", DType.BOOL, "", Source.LOCAL, Tail.HIGH, "whether optimizer.step was called with gradients that no reduction had seen"),
        ("applied_scale", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "norm of these gradients when optimizer.step was called, over their norm right after the reduction: below 1 when clipped"),
        ("applied_spread", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "largest minus smallest of the factors by which these gradients were scaled one by one, over the largest: rounding alone if all have one factor"),
        ("schedule_scale", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "factor of the gradients by torch's pipeline schedules after the backward passes: 1 over the micro-batches of a call by default (scale_grads=True); the mean over the step's micro-batches"),
        ("applied_odd", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "factor by which some of these gradients were scaled, over that of most; 1 if all have one, as when they are clipped or unscaled"),
    ),
    *declare(
        Table.GROUPS,
        ("reduction_residual", DType.FLOAT, "", Source.DERIVED, Tail.HIGH, "relative distance of the group's reduced gradient on this rank from the mean of the workers' gradients: the largest among parts of at most 10 M elements"),
        ("accumulator_change", DType.FLOAT, "", Source.SEQUENCE, Tail.HIGH, "as in workers, of the group's gradient; null where none of the step's has changed"),
    ),
)
# fmt: on

EVIDENCE = Evidence("reduction", __name__, COLUMNS)
