"""Where in a step two trainings can differ, and why: the words of ``diff`` and of ``parity``."""

from enum import StrEnum


class Stage(StrEnum):
    """Where two trainings differ, in the order of causes: the first that differs decides."""

    START = "start"
    SAMPLES = "samples"
    RANDOM = "random state"
    LABELS = "label tokens"
    LOSS = "loss"
    LOCAL = "local gradient"
    GRADIENT = "gradient"
    CLIPPING = "clipping"
    SETTINGS = "settings"
    UPDATE = "update"
    STATE = "optimizer state"


class DiffClass(StrEnum):
    """Why two trainings differ."""

    IDENTICAL = "identical"
    ROUNDING = "rounding"
    DATA = "different data"
    STATE = "different state"
    CONFIGURATION = "different configuration"
    JUMP = "bug-like jump"


CLASS_OF = {
    Stage.START: DiffClass.STATE,
    Stage.SAMPLES: DiffClass.DATA,
    Stage.RANDOM: DiffClass.STATE,
    Stage.LABELS: DiffClass.DATA,
    Stage.SETTINGS: DiffClass.CONFIGURATION,
    Stage.STATE: DiffClass.STATE,
}
"""The class of what differs first and is not rounding; of all other stages ``DiffClass.JUMP``."""
