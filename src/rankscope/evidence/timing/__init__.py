"""Where the time of a step goes."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.STEPS,
        ("overhead_seconds", DType.FLOAT, "s", Source.DERIVED, Tail.HIGH, "time the monitor took from training: the slowest worker's"),
    ),
    *declare(
        Table.WORKERS,
        ("step_seconds", DType.FLOAT, "s", Source.LOCAL, Tail.HIGH, "wall time since the step before"),
        ("busy_seconds", DType.FLOAT, "s", Source.LOCAL, Tail.HIGH, "time from the end of the reduction before until this worker's last local gradient was ready, so before it began to wait for the others; DDP on the CPU"),
        ("overhead_seconds", DType.FLOAT, "s", Source.LOCAL, Tail.HIGH, "time the monitor took from this worker's training thread; on an accelerator, from its stream"),
        ("read_seconds", DType.FLOAT, "s", Source.LOCAL, Tail.NONE, "the part of overhead_seconds in which gradients were read"),
    ),
)
# fmt: on

EVIDENCE = Evidence("timing", __name__, COLUMNS)
