"""Clipping by norm: one factor on all ranks, and one norm after it."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("clip_limit", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "max_norm of the step's call of clip_grad_norm_ or clip_grads_with_norm_; null without one, or if it clips only some of these gradients"),
        ("clip_order", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "order of the norm that torch computed for it: 2 for the L2 norm; null if the training computed the norm itself"),
        ("clip_factor", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "factor by which that call scaled, from the norm that it was given; null if that is no plain number"),
        ("clip_whole", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether all gradients that count in that norm are measured here: none of other stages, or of parts that are not compared"),
        ("clip_left_out", DType.INT, "gradients", Source.LOCAL, Tail.NONE, "gradients that it scaled, less those whose norm torch computed"),
        ("clip_value", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "clip_value of the step's call of clip_grad_value_ on any of these gradients, the smallest; null without one"),
        ("clips_between", DType.INT, "", Source.LOCAL, Tail.NONE, "micro-batches of the step after which gradients were clipped and added to later"),
        ("clips_of_nothing", DType.INT, "", Source.LOCAL, Tail.NONE, "calls of the step that clip by a norm above max_norm and get no tensor that has a gradient, where no call scales these gradients"),
        ("clip_rounding", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "relative error of a norm and a factor by rounding, at most, by the types and sizes of these gradients"),
    ),
)
# fmt: on

EVIDENCE = Evidence("clipping", __name__, COLUMNS)
