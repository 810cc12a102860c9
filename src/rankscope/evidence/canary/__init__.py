"""The same batches run on all workers: data, state, hardware or chance."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("canary_of", DType.INT, "", Source.LOCAL, Tail.NONE, "in a canary step: the rank whose batch every worker replayed"),
        ("canary_loss", DType.FLOAT, "nats/token", Source.LOCAL, Tail.NONE, "loss of that batch, or a projection of the outputs where the model returns no loss"),
        ("canary_norm", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "L2 norm of its gradient"),
        ("canary_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of all bits of its loss and gradient"),
        ("canary_again", DType.INT, "", Source.LOCAL, Tail.NONE, "the same of a second run of the same batch"),
        ("canary_again_loss", DType.FLOAT, "nats/token", Source.LOCAL, Tail.NONE, "loss of the second run"),
        ("canary_again_norm", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "L2 norm of its gradient"),
        ("canary_against", DType.INT, "", Source.LOCAL, Tail.NONE, "the rank whose batch every worker replayed as well"),
        ("canary_against_loss", DType.FLOAT, "nats/token", Source.LOCAL, Tail.NONE, "loss of that batch"),
        ("canary_against_norm", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "L2 norm of its gradient"),
        ("canary_against_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of all bits of its loss and gradient"),
        ("canary_projected", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether these losses are projections of the outputs"),
        ("canary_unit", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "unit roundoff of the coarsest type in that forward pass"),
        ("canary_program", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of what the forward pass ran: operations and their arguments, constants, parameters, random numbers, settings"),
        ("canary_seconds", DType.FLOAT, "s", Source.LOCAL, Tail.NONE, "time that the canary took from this worker, which is no part of overhead_seconds"),
    ),
)
# fmt: on

READ = "read "
"""Begins the name of a fact of a module in a worker's program: a plain value that its code reads."""

EVIDENCE = Evidence("canary", __name__, COLUMNS)
