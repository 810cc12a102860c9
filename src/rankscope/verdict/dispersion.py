"""Dispersion against sampling, and the gradient noise scale: numbers of a run, and words."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.bus.step import as_floats
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

Values = dict[str, float | int | None]  # by name; None where one is undefined


def describe_dispersion(values: Values) -> str:
    """Describe the loss dispersion compared with that of sampling, if known."""
    figures = dispersion_figures(values)
    if values["num_workers"] == 1 or values["loss_std"] is None:
        return ""
    if figures is None:
        return (
            "How much dispersion sampling alone would give cannot be known: each worker reported "
            "one loss per step. One loss per sample, or several micro-batches, would show it."
        )
    observed, ratio, expected = figures
    band = _band(values)
    meaning = {
        "about": f"within the {1 / band:.2f} to {band:.2f} that different samples of the same data "
        "may give in so many steps",
        "further": "more than sampling gives: the workers' data, or their state, differ in kind",
        "closer": _closer(values),
    }[spread_in_words(values) or "about"]
    return (
        f"Sampling alone would give a loss std of {expected}; the observed one, {observed}, is "
        f"{ratio} times that{_interval(values, 'dispersion_ratio')}, {meaning}."
    )


def _closer(values: Values) -> str:
    held = values.get("global_batch")
    if held is None or values.get("effective_batch") != held:
        return "less than different samples would give: the workers share data"
    return (
        "though all samples of a step are different: parts of a worker's batch differ by more than "
        "workers do, as where they split a group whose losses balance (completions of one prompt)"
    )


def dispersion_figures(values: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the loss std, its ratio to the std by sampling, and the latter, as printed.

    They are rounded so that they divide. The ratio is one of root mean squares over steps, and the
    std a mean over steps; the std by sampling follows from both. None where it is unknown.
    """
    observed = values.get("loss_std")
    ratio = values.get("dispersion_ratio")
    if observed is None or ratio is None:
        return None
    whole = observed / ratio if observed and ratio else values.get("loss_std_expected")
    if not whole or not math.isfinite(whole):
        return None
    texts = short(observed), short(whole)
    shown, expected = (float(text.replace(",", "")) for text in texts)
    return texts[0], f"{shown / expected:.2f}", texts[1]


def describe_noise_scale(values: Values, causes: set[str]) -> str:
    """Describe the gradient noise scale; empty where workers share data."""
    scale = values["noise_scale"]
    low = values["noise_scale_low"]
    batch = values["noise_scale_batch"]
    if batch is None or "data.duplicate_batches" in causes or low is None:
        return ""
    from_micro = values["noise_scale_from_micro"]
    unit = "micro-batches" if from_micro else "workers"
    unit = "samples" if values["noise_scale_in_samples"] else unit
    if scale is None or values["noise_scale_high"] is None:
        size = f"at least {short(low)} {unit} (95 % confidence)"
    else:
        size = f"about {short(scale)} {unit}{_interval(values, 'noise_scale', short)}"
    text = (
        f"The gradient noise scale is {size}, where noise and gradient are equally long; a step "
        f"averages {short(batch)}"
    )
    if not from_micro:
        text += (
            ". Without micro-batches it follows from local and reduced norms alone: it is the "
            "weighted cosine in other words, and cannot separate shared data from quiet gradients"
        )
    return f"{text}."


def _interval(
    values: Values, name: str, show: Callable[[float | None], str] = lambda end: f"{end:.2f}"
) -> str:
    low = values[f"{name}_low"]
    high = values[f"{name}_high"]
    if low is None or high is None:
        return ""
    return f" (95 % interval {show(low)} to {show(high)})"


def spread_in_words(values: Values) -> str | None:
    """Return whether losses lie ``closer``, ``about`` or ``further`` apart than by sampling.

    The band around 1 is 40 % plus three standard errors of the ratio for normal losses, since short
    runs and few workers measure it badly.
    """
    ratio = values["dispersion_ratio"]
    if ratio is None:
        return None
    band = _band(values)
    if ratio > band:
        return "further"
    return "closer" if ratio < 1 / band else "about"


def _band(values: Values) -> float:
    degrees = (values["steps"] or 0) * max((values["num_workers"] or 0) - 1, 1)
    return 1.4 + 3 / math.sqrt(2 * degrees)


def short(value: float | None) -> str:
    """Return a number with three significant digits, if possible without an exponent."""
    if value is None:
        return "an unknown amount"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def short_pair(first: float, last: float) -> tuple[str, str]:
    """Return two numbers as :func:`short` does, with as many decimals in both.

    Example:
        >>> short_pair(1.39, 1.4)
        ('1.39', '1.40')
    """
    pair = short(first), short(last)
    if any("e" in words for words in pair) or max(abs(first), abs(last)) >= 1000:
        return pair
    decimals = max(len(words.partition(".")[2]) for words in pair)
    return f"{first:.{decimals}f}", f"{last:.{decimals}f}"


Numbers = Mapping[str, float | int | None]

MAX_MICRO_ROWS = 2**20  # of micro-batches that are read of a long run, from even steps

_MICRO = ("step", "rank", "grad_norm", "loss_scale")


@dataclass(frozen=True, slots=True)
class _Steps:
    """Norms of T steps, before the choice of those that count."""

    steps_T: Ints
    squares_T: Floats  # mean over workers of the squared norm; NaN unless all are known
    reduced_T: Floats  # norm of the reduced gradient
    samples_T: Floats  # samples of the global batch, NaN where unknown
    micro_squares_T: Floats  # mean over workers of the sum of squared norms of the micro-batches
    num_micro_T: Ints  # M; 1 where workers differ in it
    shares_T: Floats  # sum of the squared shares of the micro-batches in a worker's gradient
    width: int


def dispersion_numbers(observed_stds_T: Floats, expected_stds_T: Floats) -> Numbers:
    """Return observed over expected loss dispersion of a run, with its 95 % interval."""
    with np.errstate(over="ignore"):
        squares = np.square(observed_stds_T), np.square(expected_stds_T)
    return _numbers("dispersion_ratio", _ratio(*squares, root=True))


def noise_numbers(run: Run) -> Numbers:
    """Return the ratio of gradient dispersions and the noise scale of a run, with intervals.

    The noise scale is in samples when all numbers of samples are known, else in units:
    micro-batches when these have norms, else workers. Workers are read from their mean and spread
    in each step, and a long run's micro-batches in an even choice of steps.
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

    Returns steps ``[T]`` and cosines ``[T]``: the steps whose micro-batches have norms; of a long
    run an even choice.
    """
    steps = _steps_of(run)
    squares = (steps.squares_T, steps.reduced_T, steps.micro_squares_T)
    within_T = noise_of_steps(*squares, steps.num_micro_T, steps.shares_T, steps.width).within_T
    known_T = np.isfinite(within_T) & (steps.squares_T > 0) & (steps.width > 1)
    return steps.steps_T[known_T], 1.0 - within_T[known_T] / steps.squares_T[known_T]


def _noise_of(steps: _Steps) -> tuple[NoiseOfSteps, Floats]:
    """Return the noise of the observed steps; only those with micro-batches, when most have them.

    Beside it: how many samples one of its units holds in each step; NaN if unknown.
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
        drawn_T = as_floats(columns["samples_drawn"])
        return _Steps(
            steps_T=steps_T,
            squares_T=squares_T,
            reduced_T=columns["grad_norm_reduced"],
            samples_T=np.where(drawn_T == 0, np.nan, drawn_T),
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


def _ratio(numerators_T: Floats, denominators_T: Floats, *, root: bool = False) -> Estimate:
    return ratio_of_sums(block_sums(numerators_T, denominators_T), root=root)


def _numbers(name: str, estimate: Estimate) -> dict[str, float | None]:
    values = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
