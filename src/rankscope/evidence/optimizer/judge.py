"""The detectors of optimizer state that a session does not begin with as it should."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.judge import held_values
from rankscope.bus.persistent_fault import PersistentFault
from rankscope.bus.replicas import StateKind
from rankscope.bus.run import RunFacts
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.evidence.optimizer import KEY
from rankscope.evidence.optimizer.start import OptimizerStart

CAUSE = "state.updates_lost"


class LostUpdates(Detector):
    """Parameters of 16 bits of which a whole kind rests, since rounding loses each update.

    All of the kind, such as the weights of all ``RMSNorm`` layers, have kept their bits over a
    window of updates, and the largest update is below half of the distance to the next value. So
    neither a clamp nor a learning rate of 0 counts, nor stochastic rounding, nor a finer copy in
    the optimizer.
    """

    def __init__(self) -> None:
        self._faults: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report kinds that rest, or move again."""
        rows = held_values(step.gathered.differences, StateKind.ROUNDED, KEY)
        kinds: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, values_W in rows.items():
            label, _, what = name.rpartition("|")
            kinds[label][what] = values_W
        for label, of in kinds.items():
            known_W = of["parameters"] != MISSING_INT
            rest = bool((of["at rest"] == of["parameters"])[known_W].all())
            share, update, value = (
                of[what][known_W].view(np.float64) for what in ("share", "update", "value")
            )
            lost = rest and 0 < share.max() < 1
            fault = self._faults.get(label)
            if not lost and (fault is None or not fault.close()):
                continue
            fault = self._faults.setdefault(label, PersistentFault())
            if lost:
                fault.see(step.gathered.step)
            largest = int(share.argmax())
            number = int(of["parameters"][known_W].max())
            updates = int(of["updates"][known_W].max())
            yield _evidence(label, fault, number, updates, float(update[largest]), value[largest])


def _evidence(
    label: str, fault: PersistentFault, number: int, updates: int, update: float, value: float
) -> FaultEvidence:
    kind, dtype, first = label.split("|")
    half = half_step(float(value), dtype)
    fields = {
        "kind": kind,
        "dtype": dtype,
        "name": first,
        "parameters": count(number, "parameter"),
        "updates": count(updates, "update"),
        "update": f"{update:.2g}",
        "value": f"{value:.4g}",
        "half": f"{half:.2g}",
        "over": "" if fault.open else " Some move again.",
    }
    numbers = {"kind": kind, "parameters": number, "updates": updates, "largest_update": update,
               "of_value": float(value), "half_step": half}  # fmt: skip
    return fault.evidence(CAUSE, Severity.WARNING, (), fields, numbers, key=f"{CAUSE}:{kind}")


def half_step(value: float, dtype: str) -> float:
    """Return half of the distance from a value to the next one towards zero.

    Example:
        >>> half_step(1.0, "bfloat16"), half_step(1.5, "bfloat16")
        (0.001953125, 0.00390625)
    """
    digits = {"bfloat16": 8, "float16": 11}[dtype]
    mantissa, exponent = np.frexp(value)
    step = 2.0 ** (int(exponent) - digits)
    return step / 4 if mantissa == 0.5 else step / 2


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return OptimizerStart(), LostUpdates()
