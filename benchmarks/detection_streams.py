"""Simulated values of workers: healthy in many ways, and beyond what the guarantee covers.

A stream yields one array ``[S, W]`` per step: S independent signals (or S repetitions of one) of W
workers. In a healthy stream the workers of a step are exchangeable given all steps before.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Stream = Iterator[Floats]
Shape = tuple[int, int]
Make = Callable[[Generator, Shape], Stream]

SPIKE_EVERY = 40
OWN_BATCHES = 4


def normal(rng: Generator, shape: Shape) -> Stream:
    """Yield standard normal values."""
    while True:
        yield rng.standard_normal(shape)


def heavy_tailed(rng: Generator, shape: Shape) -> Stream:
    """Yield Student's t with 2 degrees of freedom: its variance is infinite."""
    while True:
        yield rng.standard_t(2, shape)


def skewed(rng: Generator, shape: Shape) -> Stream:
    """Yield lognormal values."""
    while True:
        yield rng.lognormal(0.0, 1.0, shape)


def ties(rng: Generator, shape: Shape) -> Stream:
    """Yield one of four numbers, so that most workers share theirs with others."""
    while True:
        yield rng.integers(0, 4, shape).astype(np.float64)


def drift(rng: Generator, shape: Shape) -> Stream:
    """Yield values around a falling curve and a random walk that all workers share."""
    walk_S1 = np.zeros((shape[0], 1))
    for step in _steps():
        walk_S1 += 0.5 * rng.standard_normal(walk_S1.shape)
        yield 50 * math.exp(-step / 100) + walk_S1 + rng.standard_normal(shape)


def shared_spikes(rng: Generator, shape: Shape) -> Stream:
    """Yield normal values; now and then all workers jump together and scatter ten times as much."""
    for step in _steps():
        noise = rng.standard_normal(shape)
        yield 30 + 10 * noise if step % SPIKE_EVERY == SPIKE_EVERY - 1 else noise


def changing_spread(rng: Generator, shape: Shape) -> Stream:
    """Yield normal values whose spread swings over two orders of magnitude, for all workers."""
    for step in _steps():
        own_S1 = rng.lognormal(0.0, 0.5, (shape[0], 1))
        yield own_S1 * math.exp(2.3 * math.sin(step / 15)) * rng.standard_normal(shape)


HEALTHY: dict[str, Make] = {
    "normal": normal,
    "heavy-tailed (t, 2 d.o.f.)": heavy_tailed,
    "skewed (lognormal)": skewed,
    "discrete with ties": ties,
    "common drift": drift,
    "spikes shared by all": shared_spikes,
    "spread changes over time": changing_spread,
}


def autocorrelated(rho: float) -> Make:
    """Return a stream whose noise is correlated over time, within each worker (AR(1))."""

    def make(rng: Generator, shape: Shape) -> Stream:
        state = rng.standard_normal(shape)
        while True:
            yield state.copy()
            state = rho * state + math.sqrt(1 - rho**2) * rng.standard_normal(shape)

    return make


def fixed_effects(size: float) -> Make:
    """Return a stream in which each worker has an offset of its own, as with domains as shards."""

    def make(rng: Generator, shape: Shape) -> Stream:
        offset = size * rng.standard_normal(shape)
        while True:
            yield offset + rng.standard_normal(shape)

    return make


def replayed(rng: Generator, shape: Shape) -> Stream:
    """Yield what workers report that each replay four batches of their own."""
    own = rng.standard_normal((OWN_BATCHES, *shape))
    for step in _steps():
        yield own[step % OWN_BATCHES] + 0.1 * rng.standard_normal(shape)


def unequal_counts(rng: Generator, shape: Shape) -> Stream:
    """Yield means over batches that hold half as many samples on the last worker."""
    spread_W = np.ones(shape[1])
    spread_W[-1] = math.sqrt(2)
    while True:
        yield spread_W * rng.standard_normal(shape)


OUTSIDE: dict[str, Make] = {
    "each worker's noise autocorrelated, 0.3": autocorrelated(0.3),
    "each worker's noise autocorrelated, 0.9": autocorrelated(0.9),
    "fixed effects, 0.1 sd": fixed_effects(0.1),
    "fixed effects, 0.5 sd": fixed_effects(0.5),
    "each worker replays four batches": replayed,
    "half as many samples on one worker": unequal_counts,
}


def pair_values(rng: Generator, repetitions: int, workers: int) -> Stream:
    """Yield what pairs of healthy workers share, ``[S, pairs]``: cosines with worker effects."""
    upper = np.triu_indices(workers, 1)
    while True:
        own = 0.5 * rng.standard_normal((repetitions, workers))
        yield (
            own[:, upper[0]] + own[:, upper[1]] + rng.standard_normal((repetitions, len(upper[0])))
        )


def binomial_interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson for a probability."""
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else _bisect(lambda p: 1 - _cdf(hits - 1, trials, p) - tail)
    high = 1.0 if hits == trials else _bisect(lambda p: tail - _cdf(hits, trials, p))
    return low, high


def _cdf(hits: int, trials: int, p: float) -> float:
    """Return the probability of at most so many hits."""
    i = np.arange(hits + 1)
    ways = np.concatenate([[0.0], np.cumsum(np.log((trials - i[:-1]) / (i[:-1] + 1)))])
    return float(np.exp(ways + i * math.log(p) + (trials - i) * math.log1p(-p)).sum())


def _bisect(rising: Callable[[float], float]) -> float:
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _steps() -> Iterator[int]:
    step = 0
    while True:
        yield step
        step += 1
