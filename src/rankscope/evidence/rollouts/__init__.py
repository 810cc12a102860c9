"""The gap between the engine that draws completions and the trainer, in reinforcement learning."""

from rankscope.bus.evidence import Compared, Compares, DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("rollout_gap", DType.FLOAT, "nats/token", Source.LOCAL, Tail.HIGH, "mean absolute difference between the log-probabilities that the trainer and the rollout give to the tokens that the rollout drew; null unless both are at hand", Compared("gap to the rollout's log-probabilities", observed=False, by=Compares.ROLLOUTS)),
    ),
)
# fmt: on

EVIDENCE = Evidence("rollouts", __name__, COLUMNS)
