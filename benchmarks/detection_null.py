"""False alarms of the detector: on healthy streams against its bound, and outside of it.

The signals of :class:`ExchangeabilityTest` do not influence each other but in the sum, so S
repetitions of a test with one signal run as one test with S signals, with the code of the product.
"""

import zlib
from itertools import islice
from typing import Any

import detection_streams as streams
import numpy as np
from detection_streams import Floats, Stream, binomial_interval

from rankscope.stats.bets import Bet, pair_bets, worker_bets
from rankscope.stats.exchangeability import ExchangeabilityTest

Row = dict[str, Any]
THRESHOLD = 1e3
STEPS = 200
REPETITIONS = {2: 10_000, 4: 10_000, 8: 10_000, 64: 2_000, 1024: 200}
RARE_THRESHOLD = 1e6
RARE_STEPS = 1000
RARE_REPETITIONS = 10_000
PAIRED_WORKERS = 8


class Repetitions:
    """Many tests with one signal each, fed together.

    Args:
        num_units: U.
        repetitions: S.
        bets: What each bets on.
    """

    def __init__(self, num_units: int, repetitions: int, bets: tuple[Bet, ...]) -> None:
        weights_S = np.full(repetitions, 1 / repetitions)
        self._test = ExchangeabilityTest(num_units, weights_S, np.zeros(repetitions, bool), bets)
        self._shares_B = np.array([bet.weight for bet in bets]) / num_units

    def observe(self, values_SU: Floats) -> Floats:
        """Take one step; return the evidence M of each repetition ``[S]``."""
        next(self._test.observe(values_SU[None], [0]))
        detectors = self._test._detectors  # its sum is public, its parts are not
        evidence_BSU = detectors.evidence.astype(np.float64)
        evidence_S: Floats = np.einsum("b,bsu->s", self._shares_B, evidence_BSU)
        return evidence_S


def measure_healthy(scale: float) -> list[Row]:
    """Return one row per stream and number of workers."""
    rows = []
    for workers, full in REPETITIONS.items():
        repetitions = max(50, int(full * scale))
        for name, make in streams.HEALTHY.items():
            stream = make(_generator(name, workers), (repetitions, workers))
            rows.append(_row(name, workers, _first_alarms(stream, workers, repetitions)))
    repetitions = max(50, int(REPETITIONS[8] * scale / 4))
    stream = streams.pair_values(_generator("pairs", 8), repetitions, PAIRED_WORKERS)
    units = PAIRED_WORKERS * (PAIRED_WORKERS - 1) // 2
    firsts = _first_alarms(stream, units, repetitions, bets=pair_bets())
    return [*rows, _row("pairs of workers, with worker effects", PAIRED_WORKERS, firsts)]


def measure_rare(scale: float) -> list[Row]:
    """Return false alarms at the threshold of the product, in millions of steps."""
    rows = []
    repetitions = max(100, int(RARE_REPETITIONS * scale))
    for name in ("normal", "heavy-tailed (t, 2 d.o.f.)"):
        stream = streams.HEALTHY[name](_generator(name, 0), (repetitions, 8))
        firsts = _first_alarms(stream, 8, repetitions, RARE_STEPS, RARE_THRESHOLD)
        rows.append(_row(name, 8, firsts, RARE_STEPS, RARE_THRESHOLD))
    return rows


def measure_outside(scale: float) -> list[Row]:
    """Return false alarms on streams that are not exchangeable, though nothing is broken."""
    repetitions = max(50, int(1000 * scale))
    rows = []
    for name, make in streams.OUTSIDE.items():
        stream = make(_generator(name, 8), (repetitions, 8))
        firsts = _first_alarms(stream, 8, repetitions, RARE_STEPS, RARE_THRESHOLD)
        rows.append(_row(name, 8, firsts, RARE_STEPS, RARE_THRESHOLD))
    return rows


def _generator(name: str, workers: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), workers])


def _first_alarms(
    stream: Stream,
    units: int,
    repetitions: int,
    steps: int = STEPS,
    threshold: float = THRESHOLD,
    bets: tuple[Bet, ...] | None = None,
) -> Floats:
    """Return the step of each repetition's first alarm, infinite without any."""
    tests = Repetitions(units, repetitions, bets or worker_bets())
    firsts_S = np.full(repetitions, np.inf)
    for step, values_SU in enumerate(islice(stream, steps), start=1):
        alarms_S = tests.observe(values_SU) >= threshold
        firsts_S[alarms_S] = np.minimum(firsts_S[alarms_S], step)
    return firsts_S


def _row(
    name: str, workers: int, firsts_S: Floats, steps: int = STEPS, threshold: float = THRESHOLD
) -> Row:
    alarmed = firsts_S[np.isfinite(firsts_S)]
    low, high = binomial_interval(len(alarmed), len(firsts_S))
    return {
        "stream": name,
        "workers": workers,
        "repetitions": len(firsts_S),
        "steps": steps,
        "alarms": len(alarmed),
        "share": len(alarmed) / len(firsts_S),
        "low": low,
        "high": high,
        "bound": steps / threshold,
        "median": float(np.median(alarmed)) if len(alarmed) else None,
    }


if __name__ == "__main__":
    for row in [*measure_healthy(0.1), *measure_rare(0.1), *measure_outside(0.1)]:
        print(row)
