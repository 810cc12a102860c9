"""Dispersion against sampling, and the gradient noise scale, over a recorded run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats, Ints
from rankscope.core.block_ratio import BlockRatio, Estimate, ratio_of_sums
from rankscope.core.noise_scale import GradientNoise, gradient_noise, noise_scale
from rankscope.core.signals import Table
from rankscope.record import Run

Numbers = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True)
class _Step:
    """The noise of one step, and how many samples one of its units holds; NaN if unknown."""

    noise: GradientNoise
    samples: float


def dispersion_numbers(observed_stds_T: Floats, expected_stds_T: Floats) -> Numbers:
    """Return observed over expected loss dispersion of a run, with its 95 % interval.

    Args:
        observed_stds_T: Loss std over workers, one per step.
        expected_stds_T: The one that sampling alone would give.
    """
    with np.errstate(over="ignore"):
        squares = np.square(observed_stds_T), np.square(expected_stds_T)
    ratio = _ratio(zip(*squares, strict=True), root=True)
    return _numbers("dispersion_ratio", ratio)


def noise_numbers(run: Run) -> Numbers:
    """Return the ratio of gradient dispersions and the noise scale of a run, with intervals.

    The noise scale is in samples when all numbers of samples are known, else in units:
    micro-batches when these have norms, else workers.

    Raises:
        RunError: A file of the run cannot be read.
    """
    steps = _steps(run)
    ratio = _ratio(((s.noise.between, s.noise.within) for s in steps), root=True)
    in_samples = bool(steps) and all(math.isfinite(step.samples) for step in steps)
    sizes = [step.samples if in_samples else 1.0 for step in steps]
    inverse = _ratio(
        (step.noise.signal, step.noise.noise * size)
        for step, size in zip(steps, sizes, strict=True)
    )
    units = [step.noise.units * size for step, size in zip(steps, sizes, strict=True)]
    return {
        **_numbers("gradient_ratio", ratio),
        **_numbers("noise_scale", noise_scale(inverse)),
        "noise_scale_in_samples": in_samples,
        "noise_scale_from_micro": any(math.isfinite(step.noise.within) for step in steps),
        "noise_scale_batch": float(np.mean(units)) if units else None,
    }


def _steps(run: Run) -> list[_Step]:
    """Return the observed steps; only those with micro-batches, when most have them."""
    steps_T, norms_TW = run.per_worker("grad_norm")
    _, samples_TW = run.per_worker("num_samples")
    columns = run.columns(Table.STEPS, "step", "grad_norm_reduced")
    reduced = dict(
        zip(columns["step"].tolist(), columns["grad_norm_reduced"].tolist(), strict=True)
    )
    squares_TW, num_micro_T = _micro(run, steps_T, norms_TW.shape[1])
    found, alone = [], []
    for t in np.flatnonzero(np.isfinite(norms_TW).all(axis=1)).tolist():
        norm = reduced.get(int(steps_T[t]), math.nan)
        samples = float(samples_TW[t].sum()) or math.nan
        simple = gradient_noise(norms_TW[t], norm, None, 1)
        if not math.isfinite(simple.noise):
            continue
        alone.append(_Step(simple, samples / simple.units))
        full = gradient_noise(norms_TW[t], norm, squares_TW[t], int(num_micro_T[t]))
        if math.isfinite(full.within):
            found.append(_Step(full, samples / full.units))
    return found if 2 * len(found) > len(alone) else alone


def _micro(run: Run, steps_T: Ints, width: int) -> tuple[Floats, Ints]:
    """Return sums of squared norms ``[T, W]``, and M ``[T]``: 1 where workers differ in it."""
    rows = run.columns(Table.MICRO, "step", "rank", "grad_norm")
    at = np.searchsorted(steps_T, rows["step"])
    here = at < len(steps_T)
    cells = at[here] * width + rows["rank"][here]
    size = len(steps_T) * width
    with np.errstate(over="ignore"):
        squares = np.square(rows["grad_norm"][here])
    squares_TW = np.bincount(cells, squares, size).reshape(-1, width)
    counts_TW = np.bincount(cells, minlength=size).reshape(-1, width)
    equal_T = (counts_TW == counts_TW[:, :1]).all(axis=1)
    return squares_TW.astype(np.float64), np.where(equal_T, counts_TW[:, 0], 1).astype(np.int64)


def _ratio(pairs: Iterable[tuple[float, float]], *, root: bool = False) -> Estimate:
    blocks = BlockRatio()
    for numerator, denominator in pairs:
        blocks.add(float(numerator), float(denominator))
    return ratio_of_sums(blocks.sums(), root=root)


def _numbers(name: str, estimate: Estimate) -> dict[str, float | None]:
    values = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
