"""The result of a comparison of two runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rankscope.files import to_plain
from rankscope.stats.arrays import Floats, Ints
from rankscope.tools.stages import DiffClass, Stage


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which steps of two runs are compared. P pairs of steps.

    ``steps_a`` and ``steps_b`` ``[P]`` correspond one by one; ``offset`` is the step of A minus
    that of B, decided by equal batches (``by_samples``) or by step numbers; ``num_workers`` is W of
    A and of B.
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

    @property
    def same_slots(self) -> bool:
        """Whether digests are of the same tensors: the number of a step chooses them."""
        return not self.offset


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs first part.

    ``step`` is that of A, ``step_b`` that of B; ``signal`` is the column, or the kind of tensor,
    that shows it, on ``ranks`` (empty when it has no worker). ``tensor`` parts first or most, empty
    when not known; ``num_tensors`` part, of how many (None without traces). ``relative`` distance,
    ``ulp`` (its root mean square, for tensors) of ``dtype``, and the distance ``predicted`` by
    rounding alone are NaN where unknown. ``resolution``: how finely the runs were recorded
    here.
    """

    step: int
    step_b: int
    stage: Stage
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

    ``name`` is dotted (``training.optimizer.lr``, ``environment.torch``); ``kind`` is ``dtype``,
    ``training``, ``reduction``, ``config``, ``seed``, ``loader``, ``environment`` or ``monitor``.
    """

    name: str
    a: Any
    b: Any
    kind: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A relative distance over the steps of run A: ``loss``, ``gradient`` or ``parameters``.

    ``values`` ``[P]`` are 0 where equal, NaN where not known.
    """

    name: str
    steps: Ints
    values: Floats


@dataclass(frozen=True, slots=True)
class DifferenceGrowth:
    """How the distance of a curve grows after the runs have parted.

    The ``shape`` is ``exponential`` (by ``factor`` per step), ``power`` (``distance ~
    steps^exponent``) or ``flat``; the fit has seen ``num_steps`` steps.
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
    """A sudden difference of a curve beyond the trend, after the runs had already parted.

    ``before`` is the largest distance before it, ``tensor`` the one that differs most, where known.
    """

    step: int
    step_b: int
    curve: str
    before: float
    after: float
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared; ``tensors`` has relative distances where they part, largest first.

    ``ended_early`` names those of A and B of which steps are missing since they were cut short;
    ``causes`` are the most probable first; ``parting`` is None when identical, ``growth`` when
    unknown, ``jump`` without a later one.
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
    ended_early: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether all that was recorded of both is equal, and neither was cut short."""
        return self.kind is DiffClass.IDENTICAL and not self.ended_early

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values: no NaN, no infinity (those are null)."""
        aligned = self.alignment
        document = {
            "kind": "diff",
            "a": self.run_a,
            "b": self.run_b,
            "class": str(self.kind),
            "identical": self.identical,
            "ended_early": list(self.ended_early),
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
