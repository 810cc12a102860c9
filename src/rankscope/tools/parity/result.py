"""The answer of a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where two trainings can differ first, in the order of causes."""

    START = "start"
    SAMPLES = "samples"
    LABELS = "label tokens"
    LOSS = "loss"
    GRADIENT = "gradient"
    CLIPPING = "clipping"
    UPDATE = "update"
    STATE = "optimizer state"
    RANDOM = "random state"


class Kind(StrEnum):
    """The three answers."""

    SAME = "the same within rounding"
    DIFFERENT = "not the same"
    NOT_COMPARABLE = "not comparable"


EXIT_CODES = {Kind.SAME: 0, Kind.DIFFERENT: 1, Kind.NOT_COMPARABLE: 2}
"""Exit code of the command by its answer."""


ADVICE = {
    Phase.START: "Begin both with the same parameters, or use --same-start.",
    Phase.SAMPLES: "Compare the seeds, the shuffling and the sharding of the two data loaders.",
    Phase.LABELS: "Compare how labels are made, shifted, masked and cut off.",
    Phase.LOSS: "Compare the forward passes: masks, precision, and what the loss is divided by.",
    Phase.GRADIENT: "Compare what the loss is divided by, and how gradients are added up.",
    Phase.CLIPPING: "Clip by the norm of the whole model, each parameter counted once.",
    Phase.UPDATE: "Compare the optimizers: settings, groups, and which parameters they were given.",
    Phase.STATE: "Compare how the optimizer's moments and step counters are made and restored.",
    Phase.RANDOM: "Save and restore the random state of every rank.",
}
"""What to do, by the stage in which two trainings differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs by more than rounding explains.

    Attributes:
        name: The parameter.
        distance: Distance of the two, over the larger norm.
        bound: What rounding explains, over the same norm.
        factor: B over A along A's direction; NaN if A is zero.
        cosine: Between the two; NaN if one is zero.
        look: What it looks like, in words.
    """

    name: str
    distance: float
    bound: float
    factor: float
    cosine: float
    look: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer.

    Attributes:
        kind: Which of the three.
        headline: It, in one sentence.
        stage: Where the two differ first; None if they do not.
        step: Step of the first difference; -1 without one.
        differences: The tensors that differ there, those farthest beyond their bound first.
        num_tensors: Number of tensors that were compared there.
        notes: Further sentences.
        could_miss: By stage, the relative size of the largest fault that could be missed, of the
            median tensor and of the worst.
        curves: For each tensor, distance over bound, the larger one of gradient and update, of
            each step.
        num_steps: Steps that were compared.
    """

    kind: Kind
    headline: str
    stage: Phase | None = None
    step: int = -1
    differences: tuple[Difference, ...] = ()
    num_tensors: int = 0
    notes: tuple[str, ...] = ()
    could_miss: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    num_steps: int = 0

    @property
    def advice(self) -> str:
        """What to do, empty where nothing differs."""
        return "" if self.stage is None else ADVICE[self.stage]

    @property
    def limits(self) -> str:
        """How small a fault would have to be in order to be missed, in a sentence; or empty."""
        parts = [
            f"{kind}s by {median:.1g} of their norm ({worst:.1g} at worst)"
            for kind, (median, worst) in self.could_miss.items()
        ]
        return f"Smaller faults could be missed: {' and '.join(parts)}." if parts else ""

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        return EXIT_CODES[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "answer": str(self.kind),
            "headline": self.headline,
            "advice": self.advice,
            "stage": None if self.stage is None else str(self.stage),
            "step": self.step,
            "parameters": [
                {
                    "name": each.name,
                    "distance": each.distance,
                    "bound": each.bound,
                    "factor": each.factor,
                    "cosine": each.cosine,
                    "look": each.look,
                }
                for each in self.differences
            ],
            "compared": self.num_tensors,
            "steps": self.num_steps,
            "notes": list(self.notes),
            "could_miss": {n: {"median": m, "worst": w} for n, (m, w) in self.could_miss.items()},
            "curves": {name: list(values) for name, values in self.curves.items()},
        }
