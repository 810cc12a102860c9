"""The result of a comparison of two runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rankscope.files import to_plain
from rankscope.stats.arrays import Floats, Ints


class DiffClass(StrEnum):
    """Why two runs differ."""

    IDENTICAL = "identical"
    ROUNDING = "rounding"
    DATA = "different data"
    STATE = "different state"
    CONFIGURATION = "different configuration"
    JUMP = "bug-like jump"


class Moment(StrEnum):
    """Events of a step, in this order: the first that differs decides the class."""

    DATA = "data"
    RANDOM = "random generators"
    BEFORE = "state before the step"
    LOSS = "local loss"
    GRADIENT = "local gradient"
    REDUCED = "reduced gradient"
    SETTINGS = "optimizer settings"
    AFTER = "state after the step"


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which steps of two runs are compared. P pairs of steps.

    Attributes:
        steps_a: The steps of run A ``[P]``.
        steps_b: The steps of run B, one by one ``[P]``.
        offset: Step of A minus step of B.
        num_workers: W of A and of B.
        by_samples: Whether equal batches decided the offset; otherwise step numbers did.
        words: How they were aligned, in one sentence.
    """

    steps_a: Ints
    steps_b: Ints
    offset: int
    num_workers: tuple[int, int]
    by_samples: bool
    words: str

    @property
    def same_width(self) -> bool:
        """Whether both runs have as many workers."""
        return self.num_workers[0] == self.num_workers[1]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs first part.

    Attributes:
        step: The step of run A.
        step_b: The same step in run B.
        moment: The first event in it that differs.
        signal: The column, or the kind of tensor, that shows it.
        ranks: The workers that show it; empty when it has no worker.
        tensor: The tensor that parts first, or the one that parts most; empty when not known.
        num_tensors: How many tensors part in this moment, of how many; None without traces.
        value_a: The value in A, if it is one.
        value_b: The value in B.
        relative: Relative distance; NaN where unknown.
        ulp: The same in units in the last place (root mean square, for tensors).
        dtype: The type whose last place is meant.
        predicted: Relative distance that rounding alone predicts here; NaN where nothing does.
        resolution: How finely the runs were recorded here, in one sentence.
    """

    step: int
    step_b: int
    moment: Moment
    signal: str
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    num_tensors: tuple[int, int] | None = None
    value_a: float = math.nan
    value_b: float = math.nan
    relative: float = math.nan
    ulp: float = math.nan
    dtype: str = "float32"
    predicted: float = math.nan
    resolution: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting or a fact in which the runs differ.

    Attributes:
        name: Its dotted name: ``training.optimizer.lr``, ``environment.torch``.
        a: Its value in run A.
        b: Its value in run B.
        kind: Its subject: ``dtype``, ``training``, ``reduction``, ``config``, ``seed``,
            ``loader``, ``environment`` or ``monitor``.
    """

    name: str
    a: Any
    b: Any
    kind: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A relative distance over the steps. P pairs of steps.

    Attributes:
        name: ``loss``, ``gradient`` or ``parameters``.
        steps: Steps of run A ``[P]``.
        values: Relative distance ``[P]``; 0 where equal, NaN where not known.
    """

    name: str
    steps: Ints
    values: Floats


@dataclass(frozen=True, slots=True)
class DifferenceGrowth:
    """How the distance grows after the runs have parted.

    Attributes:
        curve: Name of the curve.
        shape: ``exponential``, ``power`` or ``flat``.
        factor: Growth per step, when exponential.
        exponent: p in ``distance ~ steps^p``, when a power.
        first: The first distance.
        last: The last one.
        num_steps: How many steps the fit has seen.
    """

    curve: str
    shape: str
    factor: float
    exponent: float
    first: float
    last: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Jump:
    """A sudden difference beyond the trend, after the runs had already parted.

    Attributes:
        step: Step of run A.
        step_b: The same step in run B.
        curve: The curve that jumps.
        before: Largest distance before it, or the one that the trend lets expect.
        after: The distance at the step.
        tensor: The tensor that differs most, where known.
    """

    step: int
    step_b: int
    curve: str
    before: float
    after: float
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared.

    Attributes:
        run_a: Path of run A.
        run_b: Path of run B.
        kind: The class.
        headline: The verdict in one sentence.
        explanation: The evidence for it, sentence by sentence.
        advice: The next thing to do.
        causes: Possible causes, most probable first.
        alignment: Which steps were compared.
        parting: Where they first part; None when identical.
        growth: How the distance grows; None when unknown.
        jump: A later jump; None without.
        changes: Settings and facts in which the runs differ.
        curves: Relative distances over the steps.
        tensors: Relative distance by tensor where the runs first part, largest first.
    """

    run_a: str
    run_b: str
    kind: DiffClass
    headline: str
    explanation: tuple[str, ...]
    advice: str
    causes: tuple[str, ...]
    alignment: Alignment
    parting: Parting | None = None
    growth: DifferenceGrowth | None = None
    jump: Jump | None = None
    changes: tuple[Change, ...] = ()
    curves: tuple[Curve, ...] = ()
    tensors: Mapping[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether all that was recorded of both is equal."""
        return self.kind is DiffClass.IDENTICAL

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values: no NaN, no infinity (those are null)."""
        aligned = self.alignment
        document = {
            "kind": "diff",
            "a": self.run_a,
            "b": self.run_b,
            "class": str(self.kind),
            "identical": self.identical,
            "headline": self.headline,
            "explanation": list(self.explanation),
            "advice": self.advice,
            "causes": list(self.causes),
            "alignment": {
                "steps_compared": len(aligned.steps_a),
                "first_step": int(aligned.steps_a[0]),
                "last_step": int(aligned.steps_a[-1]),
                "offset": aligned.offset,
                "num_workers": list(aligned.num_workers),
                "by_samples": aligned.by_samples,
                "words": aligned.words,
            },
            "parting": None if self.parting is None else asdict(self.parting),
            "growth": None if self.growth is None else asdict(self.growth),
            "jump": None if self.jump is None else asdict(self.jump),
            "changes": [asdict(change) for change in self.changes],
            "curves": [
                {"name": c.name, "steps": c.steps.tolist(), "values": c.values.tolist()}
                for c in self.curves
            ],
            "tensors": dict(self.tensors),
        }
        plain: dict[str, Any] = to_plain(document)
        return plain
