"""The workers' losses, from the units of their messages.

Legend of shapes: W workers, M micro-batches of all workers, U units of all micro-batches.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.messages import Columns, Combiner, Derived, Messages, fill
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import common_scale
from rankscope.stats.arrays import Bools, Floats, Ints, Ragged
from rankscope.stats.spread import mean_and_std, weighted_means_and_sems
from rankscope.stats.tokens import follow_tokens


class _Units(NamedTuple):
    """The units of all workers."""

    losses: Ragged  # loss of each unit, by worker
    weights: Ragged  # label tokens behind each, NaN if unknown
    micro: Ragged  # how many units each micro-batch has, by worker
    multipliers: Ragged  # multiplier of each micro-batch's loss before backward; empty if unknown

    def take(self, ranks: Ints) -> "_Units":
        """Return those of some workers."""
        return _Units(*(each.take(ranks) for each in self))


class Losses(Combiner):
    """Losses of workers and micro-batches."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in losses, weights and scales; return those of each micro-batch."""
        columns["loss_divided"][:] = False
        units = _as_means(messages, columns)
        broken = Ragged(~np.isfinite(units.losses.flat), units.losses.lengths_R)
        columns["nonfinite"][:] |= broken.reduced(np.logical_or, False)
        own = _losses_of(units, units.micro.flat)
        whole = own
        if not np.array_equal(units.micro.flat, units.losses.lengths_R):
            whole = _losses_of(units, units.losses.lengths_R)
        _fill_losses(units, whole, columns)
        lengths_W = units.micro.lengths_R
        return {
            "micro_losses": Ragged(own["loss"], lengths_W).rows,
            "micro_weights": Ragged(own["loss_weight"], lengths_W).rows,
            "micro_scales": _beside(units),
        }


make_combiner = Losses


def derive(gathered: GatheredStep) -> Derived:
    """Return the mean loss, weighted as in the reduction."""
    losses_W = gathered.workers["loss"]
    loss_mean, _ = mean_and_std(losses_W)
    scales_W = gathered.workers["grad_scale"]
    finite = np.isfinite(losses_W).all()
    if finite and follow_tokens(scales_W, gathered.workers["loss_weight"]):
        loss_mean = float(np.average(losses_W, weights=np.abs(scales_W)))
    return Derived({"loss_mean": loss_mean})


_NORMS = ("grad_norm", "grad_max", "reduced_norm")


def amend(gathered: GatheredStep) -> GatheredStep:
    """Divide all gradients of a step by the factor that most workers put on their loss.

    Gradient scalers multiply the loss by thousands, accumulation divides it. The factor is the
    median over workers of ``grad_scale``, one for all: a single worker whose loss is scaled
    otherwise still stands out by its gradient. Without a known factor nothing changes. The
    gradients returned are those of the unscaled loss, averaged over micro-batches.
    """
    scale = common_scale(gathered)
    if math.isnan(scale):
        return gathered
    if scale == 1 and all(len(norms) == 1 for norms in gathered.micro_norms):
        return gathered
    norms = {name: gathered.workers[name] / scale for name in _NORMS if name in gathered.workers}
    return replace(
        gathered,
        workers={**gathered.workers, **norms},
        micro_norms=tuple(norms * len(norms) / scale for norms in gathered.micro_norms),
        sketches_WK=_divided(gathered.sketches_WK, scale),
        group_norms_WG=_divided(gathered.group_norms_WG, scale),
        group_sketches_WGK=_divided(gathered.group_sketches_WGK, scale),
    )


def _divided(values: NDArray[Any] | None, scale: float) -> NDArray[Any] | None:
    if values is None or scale == 1:
        return values
    return (values / scale).astype(values.dtype, copy=False)


def _as_means(messages: Messages, columns: Columns) -> _Units:
    """Treat losses as means over label tokens where they are proven to be, with a multiplier.

    Each is a sum over label tokens, divided by their number in all micro-batches of all workers,
    perhaps times the number of workers, or of groups of them; or by that in the worker's own
    micro-batches of the step, or in the micro-batch alone; or by nothing.
    """
    names = ("losses_U", "weights_U", "units_M", "multipliers_M")
    given = _Units(*(messages[name] for name in names))
    sums = messages["sums_M4"]
    lengths_W = given.micro.lengths_R
    known_W = (sums.lengths_R > 0) & (sums.lengths_R == 4 * lengths_W)
    if not known_W.all():
        return _of_two_kinds(given, sums, known_W) if known_W.any() else given
    count_M, divisor_M, loss_M, multiplier_M = sums.flat.reshape(-1, 4).T.copy()
    own = _are_own_means(Ragged(count_M, lengths_W), divisor_M)
    divided = not own and _is_divided_by_all(count_M, divisor_M, len(lengths_W))
    if not (own or divided or (_are_close(divisor_M, 1.0).all() and count_M.max() > 1)):
        return given
    columns["loss_divided"][:] = divided
    ones_M = np.ones(len(count_M), np.int64)
    return _Units(*(Ragged(each, lengths_W) for each in (loss_M, count_M, ones_M, multiplier_M)))


def _of_two_kinds(given: _Units, sums: Ragged, known_W: Bools) -> _Units:
    """Return losses of which some workers' are sums over label tokens, as means over these."""
    kept = zip(*(each.rows for each in given), strict=True)
    rows = []
    for known, sums_M, units in zip(known_W, sums.rows, kept, strict=True):
        count_M, _, loss_M, multiplier_M = sums_M.reshape(-1, 4).T if known else np.empty((4, 0))
        ones_M = np.ones(len(count_M), np.int64)
        rows.append((loss_M, count_M, ones_M, multiplier_M) if known else units)
    return _Units(*(Ragged.of(each) for each in zip(*rows, strict=True)))


def _is_divided_by_all(count_M: Floats, divisor_M: Floats, num_workers: int) -> bool:
    """Return whether all divide by the sum of all counts, over a divisor of W."""
    total = float(count_M.sum())
    times = total / float(divisor_M[0]) if divisor_M[0] else math.nan
    return (
        0.5 < times < num_workers + 0.5
        and num_workers % round(times) == 0
        and bool(_are_close(divisor_M, total / round(times)).all())
    )


def _are_own_means(counts: Ragged, divisor_M: Floats) -> bool:
    """Return whether each worker divides by numbers of its own label tokens."""
    count_M = counts.flat
    lengths_W = counts.lengths_R
    none_M = count_M <= 0
    number_M = counts.spread(lengths_W)
    alone_M = _are_close(divisor_M, count_M) | _are_close(divisor_M, count_M * number_M)
    whole_M = _are_close(divisor_M, counts.spread(counts.reduced(np.add, 0.0)))
    alone_W, whole_W = (
        Ragged(each | none_M, lengths_W).reduced(np.logical_and, True)
        for each in (alone_M, whole_M)
    )
    nothing_W = Ragged(none_M, lengths_W).reduced(np.logical_and, True)
    return bool((~nothing_W & (alone_W | whole_W)).all())


def _are_close(values_M: Floats, expected: Floats | float) -> Bools:
    return np.isclose(values_M, expected, rtol=1e-6, atol=0.0)


def _fill_losses(units: _Units, whole: Mapping[str, Floats], columns: Columns) -> None:
    """Fill the workers' losses and scales in."""
    ranks = np.flatnonzero(units.micro.lengths_R)
    fill(columns, ranks, {name: values_W[ranks] for name, values_W in whole.items()})
    chosen = np.flatnonzero((units.micro.lengths_R > 1) & _knows_multipliers(units))
    if len(chosen):
        trained = _with_trained_weights(units.take(chosen))
        changed = _losses_of(trained, trained.losses.lengths_R)
        fill(columns, chosen, {name: changed[name] for name in ("loss", "loss_sem")})
    ranks = np.flatnonzero(units.multipliers.lengths_R)
    fill(columns, ranks, {"grad_scale": units.multipliers.reduced(np.add, 0.0)[ranks]})


def _losses_of(units: _Units, lengths: Ints) -> dict[str, Floats]:
    """Return the columns of losses for so many units each."""
    means, sems = weighted_means_and_sems(units.losses.flat, units.weights.flat, lengths)
    totals = Ragged(units.weights.flat, lengths).reduced(np.add, 0.0)
    return {"loss": means, "loss_sem": sems, "loss_weight": totals}


def _knows_multipliers(units: _Units) -> Bools:
    """Return whether the multipliers of all micro-batches are known, and some are not zero."""
    flat = units.multipliers.flat
    lengths_W = units.multipliers.lengths_R
    finite_W = Ragged(np.isfinite(flat), lengths_W).reduced(np.logical_and, True)
    some_W = Ragged(flat != 0, lengths_W).reduced(np.logical_or, False)
    return np.asarray((lengths_W == units.micro.lengths_R) & finite_W & some_W)


def _with_trained_weights(units: _Units) -> _Units:
    """Return the units with their weights in the trained loss: by multipliers, then by tokens."""
    weights = units.weights
    known_W = Ragged(np.isfinite(weights.flat), weights.lengths_R).reduced(np.logical_and, True)
    tokens_U = np.where(weights.spread(known_W), weights.flat, 1.0)
    micro_U = np.repeat(np.arange(len(units.micro.flat)), units.micro.flat)
    tokens_M = np.bincount(micro_U, tokens_U, len(units.micro.flat))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights_U = tokens_U * (np.abs(units.multipliers.flat) / tokens_M)[micro_U]
    return units._replace(weights=Ragged(np.where(tokens_U > 0, weights_U, 0.0), weights.lengths_R))


def _beside(units: _Units) -> tuple[Floats, ...]:
    """Return the multipliers beside the micro-batches; NaN where they are unknown."""
    multipliers = units.multipliers
    micro = units.micro
    known_W = multipliers.lengths_R == micro.lengths_R
    scales_M = np.full(len(micro.flat), np.nan)
    scales_M[micro.spread(known_W)] = multipliers.flat[multipliers.spread(known_W)]
    return Ragged(scales_M, micro.lengths_R).rows
