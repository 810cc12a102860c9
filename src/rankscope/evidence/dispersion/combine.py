"""The dispersion of losses, norms and directions over the workers of a step."""

import math

import numpy as np

from rankscope.bus.messages import Derived
from rankscope.bus.step import GatheredStep, reduced_norm
from rankscope.stats.arrays import Floats
from rankscope.stats.consensus import step_values
from rankscope.stats.direction import (
    cosines_from_gram,
    gram,
    has_direction,
    leave_one_out,
    leave_one_out_from_mean,
    mean_and_min_cosine,
    norm_weighted_cosine,
    norm_weighted_cosine_from_mean,
)
from rankscope.stats.spread import expected_std, mean_and_std, value_range


def derive(gathered: GatheredStep) -> Derived:
    """Return the spreads and cosines of a step."""
    directions, cosine_rest_W, cosines_WW = _directions(gathered)
    return Derived(
        steps={**_spreads(gathered), **directions},
        workers={"cosine_rest": cosine_rest_W},
        report={
            "cosines_WW": cosines_WW,
            "group_cosine_rest_WG": _group_directions(gathered),
        },
    )


def _spreads(gathered: GatheredStep) -> dict[str, float]:
    losses_W = gathered.workers["loss"]
    _, loss_std = mean_and_std(losses_W)
    norm_mean = math.nan
    norm_std = math.nan
    if gathered.observed:
        norm_mean, norm_std = mean_and_std(gathered.workers["grad_norm"])
    return {
        "loss_std": loss_std,
        "loss_range": value_range(losses_W),
        "loss_std_expected": expected_std(gathered.workers["loss_sem"]),
        "grad_norm_mean": norm_mean,
        "grad_norm_std": norm_std,
    }


def _directions(gathered: GatheredStep) -> tuple[dict[str, float], Floats, Floats | None]:
    """Return the columns of the steps table, ``cosine_rest`` ``[W]`` and all cosines.

    Without sketches, the norms of local and reduced gradients still give the weighted mean cosine,
    exactly, and each worker's product with the reduced one gives its own cosine.
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
        norms_W = gathered.workers["grad_norm"]
        reduced = reduced_norm(gathered)
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
