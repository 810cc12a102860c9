"""From the workers' raw values to the step that the record holds."""

import math

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats
from rankscope.core.consensus import step_values
from rankscope.core.direction import (
    cosines_from_gram,
    gram,
    has_direction,
    leave_one_out,
    leave_one_out_from_mean,
    mean_and_min_cosine,
    norm_weighted_cosine,
    norm_weighted_cosine_from_mean,
)
from rankscope.core.dispersion import expected_std, mean_and_std, value_range
from rankscope.core.signals import Source, Table, signals
from rankscope.core.step import MISSING_INT, GatheredStep, StepReport
from rankscope.core.weighting import follow_tokens

_STEPS = tuple(signal.name for signal in signals(Table.STEPS, Source.DERIVED))
_ALL_STEPS = set(_STEPS)
_ALL_WORKERS = {signal.name for signal in signals(Table.WORKERS, Source.DERIVED)}


def summarize(gathered: GatheredStep) -> StepReport:
    """Compute every DERIVED column of a step.

    Args:
        gathered: The values of all W workers. Workers' values that are missing or not finite are
            left out of means and spreads.

    Returns:
        The report; equal inputs give equal reports, on every worker alike. Gradient columns are
        NaN in a step that was not observed, sample columns where no worker named its samples.
    """
    directions, cosine_rest_W, cosines_WW = _directions(gathered)
    values = {
        **_dispersions(gathered),
        **_reduction(gathered),
        **directions,
        **_samples(gathered),
        "interval": float(gathered.interval),
    }
    derived = {"cosine_rest": cosine_rest_W}
    assert values.keys() == _ALL_STEPS, "the steps table has other derived columns"
    assert derived.keys() == _ALL_WORKERS, "the workers table has other derived columns"
    return StepReport(
        gathered,
        {name: values[name] for name in _STEPS},
        derived,
        cosines_WW,
        _group_directions(gathered),
    )


def _dispersions(gathered: GatheredStep) -> dict[str, float]:
    workers = gathered.workers
    losses_W, overheads_W = workers["loss"], workers["overhead_seconds"]
    loss_mean, loss_std = mean_and_std(losses_W)
    scales_W = workers["grad_scale"]
    if np.isfinite(losses_W).all() and follow_tokens(scales_W, workers["loss_weight"]):
        loss_mean = float(np.average(losses_W, weights=np.abs(scales_W)))
    norm_mean, norm_std = math.nan, math.nan
    if gathered.observed:
        norm_mean, norm_std = mean_and_std(workers["grad_norm"])
    finite_overheads = overheads_W[np.isfinite(overheads_W)]
    return {
        "loss_mean": loss_mean,
        "loss_std": loss_std,
        "loss_range": value_range(losses_W),
        "loss_std_expected": expected_std(workers["loss_sem"]),
        "grad_norm_mean": norm_mean,
        "grad_norm_std": norm_std,
        "overhead_seconds": float(finite_overheads.max()) if finite_overheads.size else math.nan,
    }


def _directions(gathered: GatheredStep) -> tuple[dict[str, float], Floats, Floats | None]:
    """Return the columns of the steps table, ``cosine_rest`` ``[W]`` and all cosines.

    Without sketches, the norms of local and reduced gradients still give the
    weighted mean cosine, exactly, and with each worker's product with the reduced one its own.
    """
    values = dict.fromkeys(
        ("cosine_mean", "cosine_weighted", "cosine_min", "directions_undefined"), math.nan
    )
    undefined_W = np.full(gathered.num_workers, math.nan)
    if not gathered.observed:
        return values, undefined_W, None
    consensus = gathered.consensus
    if consensus is not None:
        return step_values(consensus), consensus.cosine_rest_W, None
    if gathered.sketches_WK is None:
        norms_W, reduced = gathered.workers["grad_norm"], _reduced(gathered)
        values["cosine_weighted"] = norm_weighted_cosine_from_mean(norms_W, reduced)
        values["directions_undefined"] = float(np.sum(~(np.isfinite(norms_W) & (norms_W > 0))))
        products_W = gathered.reduced_products_W
        products_W = undefined_W if products_W is None else products_W
        return values, leave_one_out_from_mean(norms_W, reduced, products_W), None
    gram_WW = gram(gathered.sketches_WK)
    cosines_WW = cosines_from_gram(gram_WW)
    mean, smallest = mean_and_min_cosine(cosines_WW)
    values = {
        "cosine_mean": mean,
        "cosine_weighted": norm_weighted_cosine(gram_WW),
        "cosine_min": smallest,
        "directions_undefined": float(len(gram_WW) - np.count_nonzero(has_direction(gram_WW))),
    }
    return values, leave_one_out(gram_WW), cosines_WW


def _group_directions(gathered: GatheredStep) -> Floats | None:
    """Return for each worker and group ``[W, G]`` its leave-one-out cosine, None without sketch."""
    if gathered.consensus is not None and gathered.groups_in_turn is not None:
        cosines_WG = np.full((gathered.num_workers, len(gathered.groups)), math.nan)
        cosines_WG[:, gathered.groups_in_turn] = gathered.consensus.group_cosine_rest_Wg
        return cosines_WG
    sketches_WGK = gathered.group_sketches_WGK
    if sketches_WGK is None or not sketches_WGK.size:
        return None
    return np.ascontiguousarray(leave_one_out(gram(sketches_WGK.swapaxes(0, 1))).T)


def _reduction(gathered: GatheredStep) -> dict[str, float]:
    """Return the norm of the reduced gradient, and how far it is from the workers' mean."""
    residuals_W = gathered.total_residuals_W
    known_W = np.empty(0) if residuals_W is None else residuals_W[np.isfinite(residuals_W)]
    return {
        "grad_norm_reduced": _reduced(gathered),
        "reduction_residual": float(known_W.max()) if known_W.size else math.nan,
    }


def _reduced(gathered: GatheredStep) -> float:
    """Return the norm of the reduced gradient, from the parts that the workers hold."""
    parts_W = gathered.workers["reduced_norm"]
    return math.sqrt(parts_W @ parts_W) / math.sqrt(gathered.reduced_copies)


def _samples(gathered: GatheredStep) -> dict[str, float]:
    """Return how many samples were drawn, and how many of them differ.

    Some of a worker's samples may be unknown, when it drew more than a message holds. Then the
    number of distinct ones is unknown too.
    """
    known = sum(len(samples) for samples in gathered.samples)
    drawn = int(_num_samples(gathered).sum())
    if drawn == 0:
        return {"samples_drawn": math.nan, "samples_distinct": math.nan}
    distinct = _num_distinct(np.concatenate(gathered.samples)) if known == drawn else math.nan
    return {"samples_drawn": float(drawn), "samples_distinct": distinct}


def _num_distinct(values: NDArray[np.int64]) -> float:
    ordered = np.sort(values)
    return float(1 + np.count_nonzero(ordered[1:] != ordered[:-1]))


def _num_samples(gathered: GatheredStep) -> NDArray[np.int64]:
    """Return how many samples each worker drew ``[W]``: what it says, or how many it names."""
    named_W = np.array([len(samples) for samples in gathered.samples], np.int64)
    said_W = gathered.workers["num_samples"]
    return np.maximum(named_W, np.where(said_W == MISSING_INT, 0, said_W))
