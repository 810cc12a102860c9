"""Versions, devices, precision and optimizer settings of each worker."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("lr", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "learning rate of the optimizer's first parameter group"),
        ("weight_decay", DType.FLOAT, "", Source.LOCAL, Tail.BOTH, "weight decay of the optimizer's first parameter group"),
        ("rates_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the learning rates of the optimizer's other parameter groups; null when there is one group"),
        ("settings_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of all other settings of all parameter groups of the optimizer"),
        ("held_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of which of the model's parameters the optimizer holds; null where it holds others, such as a flat share"),
        ("optimizer_steps", DType.INT, "", Source.LOCAL, Tail.LOW, "calls of optimizer.step since the step before"),
        ("lr_changes", DType.INT, "", Source.LOCAL, Tail.NONE, "changes of that learning rate between the forward passes of the step"),
        ("precision", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the precision of the forward pass: types of parameters, autocast, TF32, determinism"),
        ("modes", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the modules in training and in evaluation mode, read in every 16th step"),
        ("dropout_off", DType.INT, "", Source.LOCAL, Tail.NONE, "1 where all dropout layers beside trained parameters are in evaluation mode, 2 where the model has none and batch normalisation, and is in evaluation mode as a whole after training mode, else 0; read with the modes"),
    ),
)
# fmt: on

MODES = "modes"
SETTINGS = "settings"
PRECISION = "precision"
"""Keys of modes, settings and precision among the names of a step's message."""

EVIDENCE = Evidence("environment", __name__, COLUMNS)
