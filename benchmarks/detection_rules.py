"""The fixed rules of others, to compare with: each says which workers it would flag in a step."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from detection_streams import HEALTHY, Floats, Make
from numpy.random import Generator
from numpy.typing import NDArray

Row = dict[str, Any]
Flags = NDArray[np.bool_]
Rule = Callable[[Floats], Flags]

WORKERS = 8
FAULTY = 5
LOSS, NOISE = 3.0, 0.1
HEALTHY_RUNS, HEALTHY_STEPS = 50, 1000
START, LOOKED_FOR = 50, 300


def sigmas(values_TW: Floats, ddof: int) -> Flags:
    """Flag who is more than three standard deviations from the mean of the step."""
    away = np.abs(values_TW - values_TW.mean(1, keepdims=True))
    return np.asarray(away > 3 * values_TW.std(1, ddof=ddof, keepdims=True))


def mads(values_TW: Floats, factor: float) -> Flags:
    """Flag who is more than three (scaled) median absolute deviations from the median."""
    away = np.abs(values_TW - np.median(values_TW, axis=1, keepdims=True))
    return np.asarray(away > 3 * factor * np.median(away, axis=1, keepdims=True))


def ratio(values_TW: Floats) -> Flags:
    """Flag who is above twice the median of the step, or below half of it."""
    middle = np.median(values_TW, axis=1, keepdims=True)
    return (values_TW > 2 * middle) | (values_TW < middle / 2)


def spike(values_TW: Floats) -> Flags:
    """Flag who is above ten times the largest value that it has ever had."""
    largest = np.maximum.accumulate(values_TW, axis=0)
    flags = np.zeros(values_TW.shape, bool)
    flags[1:] = values_TW[1:] > 10 * largest[:-1]
    return flags


RULES: dict[str, Rule] = {
    "3 σ (ddof 0)": lambda values: sigmas(values, 0),
    "3 σ (ddof 1)": lambda values: sigmas(values, 1),
    "3 · MAD": lambda values: mads(values, 1.0),
    "3 · 1.4826 · MAD": lambda values: mads(values, 1.4826),
    "2 × the median": ratio,
    "10 × the running maximum": spike,
}


def false_alarms(rule: Rule, make: Make, workers: int) -> float:
    """Return the share of healthy steps in which a rule flags anybody; losses of 3 ± 0.1."""
    rng = np.random.default_rng(workers)
    flagged = 0
    for _ in range(HEALTHY_RUNS):
        stream = islice(make(rng, (1, workers)), HEALTHY_STEPS)
        values_TW = np.concatenate(list(stream))
        flagged += int(rule(LOSS + NOISE * values_TW).any(axis=1).sum())
    return flagged / (HEALTHY_RUNS * HEALTHY_STEPS)


def delay(rule: Rule, fault: Callable[[Generator], Floats], tries: int = 400) -> Row:
    """Return how long a rule takes to flag anybody once a fault has begun, and whom."""
    rng = np.random.default_rng(1)
    delays, right = [], 0
    for _ in range(tries):
        before_TW = rng.standard_normal((START, WORKERS))
        values_TW = LOSS + NOISE * np.concatenate([before_TW, fault(rng)])
        flags_TW = rule(values_TW)[START:]
        steps = np.flatnonzero(flags_TW.any(axis=1))
        delays.append(float(steps[0] + 1) if len(steps) else np.inf)
        if len(steps):
            right += np.flatnonzero(flags_TW[steps[0]]).tolist() == [FAULTY]
    median = float(np.median(delays))
    found = int(np.isfinite(delays).sum())
    return {
        "median": median if np.isfinite(median) else None,
        "found": found / tries,
        "right": right / found if found else None,
    }


def shifted(size: float) -> Callable[[Generator], Floats]:
    """Return a fault: one worker's loss is shifted for good."""

    def draw(rng: Generator) -> Floats:
        values_TW = rng.standard_normal((LOOKED_FOR, WORKERS))
        values_TW[:, FAULTY] += size
        return values_TW

    return draw


def rare(rng: Generator) -> Floats:
    """Return a fault: a large error in every fifth step, up or down."""
    values_TW = rng.standard_normal((LOOKED_FOR, WORKERS))
    values_TW[::5, FAULTY] += 6.5 * rng.choice([-1, 1], len(values_TW[::5]))
    return values_TW


FAULTS: dict[str, Callable[[Generator], Floats]] = {
    "loss + 0.77 sd": shifted(0.77),
    "loss + 1.5 sd": shifted(1.5),
    "loss + 3.5 sd": shifted(3.5),
    "loss ± 6.5 sd in every fifth step": rare,
}


def measure() -> list[Row]:
    """Return one row per rule."""
    return [
        {
            "rule": name,
            "false": {
                "normal, W = 8": false_alarms(rule, HEALTHY["normal"], 8),
                "heavy-tailed, W = 8": false_alarms(rule, HEALTHY["heavy-tailed (t, 2 d.o.f.)"], 8),
                "normal, W = 64": false_alarms(rule, HEALTHY["normal"], 64),
            },
            "faults": {words: delay(rule, fault) for words, fault in FAULTS.items()},
        }
        for name, rule in RULES.items()
    ]
