"""Detectors of what an optimizer's updates do: lost in rounding, without gradients, undone."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, evidence_at
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind
from rankscope.bus.steps import Step
from rankscope.bus.words import count, name_ranks, shortened
from rankscope.evidence.optimizer import KEY
from rankscope.stats.arrays import MISSING_INT

_STALE_FROM = 3  # steps
_MOST_NAMED = 3
_NOTHING = np.empty(0, np.int64)

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


UNSEEN = "optimizer-without-gradients"


class OptimizerWithoutGradients(Detector):
    """An optimizer that finds no gradient in call after call, while no parameter changes."""

    def __init__(self) -> None:
        self._fault = PersistentFault()
        self._numbers: dict[str, int] = {}
        self._ranks: list[int] = []

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report calls without a gradient, or their end."""
        rows = held_values(step.gathered.differences, StateKind.MISSED, KEY)
        calls_W = rows.get("calls", _NOTHING)
        missed_W = (calls_W != MISSING_INT) & (calls_W > 0)
        number = step.gathered.step
        if missed_W.any():
            self._numbers = {name: int(v_W[missed_W].max()) for name, v_W in rows.items()}
            self._ranks = unless_all(np.flatnonzero(missed_W).tolist(), len(missed_W))
            first = number - self._numbers["calls"] + 1
            self._fault.see(number, first=first, before=number - first)
        elif not len(calls_W) or not self._fault.close():
            return
        numbers = self._numbers
        known = count(numbers["parameters"], "parameter")
        if numbers["foreign"] == numbers["parameters"]:
            where = " None of them is a parameter of the model."
        elif numbers["elsewhere"]:
            where = " They have gradients in main_grad, where Megatron-core's wrapper puts them."
        else:
            where = ""
        fields = {
            "step": f"{number:,}",
            "parameters": known,
            "calls": count(numbers["calls"], "call"),
            "on": f" on {name_ranks(self._ranks)}" if self._ranks else "",
            "where": where,
            "learnt": " Nothing is learnt." if self._fault.open else " Later calls find one.",
        }
        yield self._fault.evidence(UNSEEN, Severity.ERROR, self._ranks, fields, numbers)


REPLACED = "state.weights_replaced"


class ReplacedWeights(Detector):
    """Weights that the first update of a session replaces by copies which the optimizer had made.

    After an update, each weight is the rounded copy that the optimizer trains. Before the first one
    some were not: they were loaded after the copies were made, and what was loaded is lost.
    """

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report weights that were replaced in it."""
        rows = held_values(step.gathered.differences, StateKind.REPLACED, KEY)
        apart_W = rows.get("apart", _NOTHING)
        known_W = (apart_W != MISSING_INT) & (apart_W > 0)
        if not known_W.any():
            return
        ranks = unless_all(np.flatnonzero(known_W).tolist(), len(known_W))
        names = [name.removeprefix("apart: ") for name in rows if name.startswith("apart: ")]
        number = step.gathered.step
        fields = {
            "step": f"{number:,}",
            "apart": count(int(apart_W[known_W].max()), "weight"),
            "copies": f"{int(rows['copies'][known_W].max()):,}",
            "names": shortened(names, _MOST_NAMED),
            "on": f" on {name_ranks(ranks)}" if ranks else "",
        }
        yield evidence_at(number, REPLACED, Severity.WARNING, ranks, fields, fields)


STALE = "compute.stale_copies"


class StaleCopies(Detector):
    """Forward passes with copies of weights that autocast made before the last update."""

    def __init__(self) -> None:
        self._fault = PersistentFault(_STALE_FROM)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report stale copies, or that there are none any more."""
        rows = held_values(step.gathered.differences, StateKind.STALE, KEY)
        stale_W = rows.get("stale", _NOTHING)
        if not (stale_W != MISSING_INT).any():
            return
        ranks = np.flatnonzero(stale_W == 1).tolist()
        if self._fault.observe(step.gathered.step, ranks):
            numbers = {"steps": self._fault.count}
            yield self._fault.evidence(STALE, Severity.ERROR, self._fault.ranks, {}, numbers)


def unless_all(ranks: list[int], width: int) -> list[int]:
    """Return the ranks that a finding names: none where it is all of them."""
    return [] if len(ranks) == width else ranks
