"""Dispersion against sampling, and the gradient noise scale, over a recorded run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.bus.columns import Table
from rankscope.bus.step import MISSING_INT
from rankscope.record import Columns, Run
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.noise_scale import (
    Estimate,
    NoiseOfSteps,
    block_sums,
    micro_shares,
    noise_of_steps,
    noise_scale,
    ratio_of_sums,
)

Numbers = Mapping[str, float | int | None]

MAX_MICRO_ROWS = 2**20
"""Most rows of micro-batches that are read of a long run, from evenly chosen steps."""

_MICRO = ("step", "rank", "grad_norm", "loss_scale")


@dataclass(frozen=True, slots=True)
class _Steps:
    """Norms of T steps, before the choice of those that count.

    Attributes:
        steps_T: Their numbers.
        squares_T: Mean over workers of the squared norm; NaN unless all are known.
        reduced_T: Norm of the reduced gradient.
        samples_T: Samples of the global batch, NaN where unknown.
        micro_squares_T: Mean over workers of the sum of squared norms of the micro-batches.
        num_micro_T: M; 1 where workers differ in it.
        shares_T: Sum of the squared shares of the micro-batches in a worker's gradient.
        width: W.
    """

    steps_T: Ints
    squares_T: Floats
    reduced_T: Floats
    samples_T: Floats
    micro_squares_T: Floats
    num_micro_T: Ints
    shares_T: Floats
    width: int


def dispersion_numbers(observed_stds_T: Floats, expected_stds_T: Floats) -> Numbers:
    """Return observed over expected loss dispersion of a run, with its 95 % interval.

    Args:
        observed_stds_T: Loss std over workers, one per step.
        expected_stds_T: The one that sampling alone would give.
    """
    with np.errstate(over="ignore"):
        squares = np.square(observed_stds_T), np.square(expected_stds_T)
    return _numbers("dispersion_ratio", _ratio(*squares, root=True))


def noise_numbers(run: Run) -> Numbers:
    """Return the ratio of gradient dispersions and the noise scale of a run, with intervals.

    The noise scale is in samples when all numbers of samples are known, else in units:
    micro-batches when these have norms, else workers. Workers are read from their mean and spread
    in each step, and a long run's micro-batches in an even choice of steps.

    Raises:
        RunError: A file of the run cannot be read.
    """
    noise, samples_T = _noise_of(_steps_of(run))
    ratio = _ratio(noise.between_T, noise.within_T, root=True)
    in_samples = bool(len(samples_T) and np.isfinite(samples_T).all())
    size_T = samples_T if in_samples else np.ones(len(samples_T))
    with np.errstate(over="ignore"):
        inverse = _ratio(noise.signal_T, noise.noise_T * size_T)
    units_T = noise.units_T * size_T
    return {
        **_numbers("gradient_ratio", ratio),
        **_numbers("noise_scale", noise_scale(inverse)),
        "noise_scale_in_samples": in_samples,
        "noise_scale_from_micro": bool(np.isfinite(noise.within_T).any()),
        "noise_scale_batch": float(np.mean(units_T)) if len(units_T) else None,
    }


def expected_cosines(run: Run) -> tuple[Ints, Floats]:
    """Return the cosine between workers that sampling alone would give, step by step.

    The micro-batches of a worker show how far its gradient lies from the true one by chance:
    of the squared norm ``a`` of a worker's gradient, ``v`` is such noise, and two workers that draw
    from the same distribution share the rest. Their cosine, weighted by norms, is 1 − v/a. It is
    an estimate from one step, and can be negative.

    Returns:
        Steps ``[T]`` and cosines ``[T]``: the steps whose micro-batches have norms; of a long run
        an even choice. None without gradient accumulation, or under one worker.

    Raises:
        RunError: A file of the run cannot be read.
    """
    steps = _steps_of(run)
    squares = (steps.squares_T, steps.reduced_T, steps.micro_squares_T)
    within_T = noise_of_steps(*squares, steps.num_micro_T, steps.shares_T, steps.width).within_T
    known_T = np.isfinite(within_T) & (steps.squares_T > 0) & (steps.width > 1)
    return steps.steps_T[known_T], 1.0 - within_T[known_T] / steps.squares_T[known_T]


def _noise_of(steps: _Steps) -> tuple[NoiseOfSteps, Floats]:
    """Return the noise of the observed steps; only those with micro-batches, when most have them.

    Returns:
        The noise, and how many samples one of its units holds in each step; NaN if unknown.
    """
    alone = np.ones(len(steps.squares_T), np.int64)
    squares = (steps.squares_T, steps.reduced_T, steps.micro_squares_T)
    simple = noise_of_steps(*squares, alone, steps.shares_T, steps.width)
    full = noise_of_steps(*squares, steps.num_micro_T, steps.shares_T, steps.width)
    known_T = np.isfinite(simple.noise_T)
    found_T = known_T & np.isfinite(full.within_T)
    mostly = 2 * int(found_T.sum()) > int(known_T.sum())
    noise = full.at(found_T) if mostly else simple.at(known_T)
    return noise, steps.samples_T[found_T if mostly else known_T] / noise.units_T


def _steps_of(run: Run) -> _Steps:
    columns = run.steps(
        "step", "grad_norm_mean", "grad_norm_std", "grad_norm_reduced", "samples_drawn"
    )
    steps_T = columns["step"]
    micro = run.sampled(Table.MICRO, *_MICRO, max_rows=MAX_MICRO_ROWS)
    if run.is_long and len(micro["step"]):
        kept_T = np.isin(steps_T, micro["step"])
        columns = {name: column[kept_T] for name, column in columns.items()}
        steps_T = columns["step"]
    micro_squares_T, num_micro_T, shares_T = _micro(micro, steps_T, run.num_workers)
    with np.errstate(over="ignore", invalid="ignore"):
        squares_T = np.square(columns["grad_norm_mean"]) + np.square(columns["grad_norm_std"])
        drawn_T = np.where(columns["samples_drawn"] == MISSING_INT, 0, columns["samples_drawn"])
        return _Steps(
            steps_T=steps_T,
            squares_T=squares_T,
            reduced_T=columns["grad_norm_reduced"],
            samples_T=_unless_zero(drawn_T.astype(np.float64)),
            micro_squares_T=micro_squares_T,
            num_micro_T=num_micro_T,
            shares_T=shares_T,
            width=run.num_workers,
        )


def _micro(rows: Columns, steps_T: Ints, width: int) -> tuple[Floats, Ints, Floats]:
    """Return the workers' mean sum of squared norms ``[T]``, M (1 if they differ), and shares."""
    if not len(rows["step"]):
        unknown_T = np.full(len(steps_T), np.nan)
        return unknown_T, np.ones(len(steps_T), np.int64), unknown_T
    at = np.searchsorted(steps_T, rows["step"])
    here = np.isin(rows["step"], steps_T)
    cells = at[here] * width + rows["rank"][here]
    size = len(steps_T) * width

    def sums(values: Floats) -> Floats:
        return np.asarray(np.bincount(cells, values, size), np.float64).reshape(-1, width)

    scales = rows["loss_scale"][here]
    with np.errstate(over="ignore"):
        means_T = sums(np.square(rows["grad_norm"][here])).mean(axis=1)
        scales_TW = sums(scales)
        scale_squares_TW = sums(np.square(scales))
    counts_TW = np.bincount(cells, minlength=size).reshape(-1, width)
    equal_T = (counts_TW == counts_TW[:, :1]).all(axis=1)
    num_micro_T = np.where(equal_T, counts_TW[:, 0], 1).astype(np.int64)
    return means_T, num_micro_T, micro_shares(scales_TW, scale_squares_TW, num_micro_T)


def _unless_zero(values_T: Floats) -> Floats:
    return np.where(values_T == 0, np.nan, values_T)


def _ratio(numerators_T: Floats, denominators_T: Floats, *, root: bool = False) -> Estimate:
    return ratio_of_sums(block_sums(numerators_T, denominators_T), root=root)


def _numbers(name: str, estimate: Estimate) -> dict[str, float | None]:
    values = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
