"""The workers' losses, from the units of their messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.judge import Columns, Combiner, Derived, Message, fill
from rankscope.bus.layout import Layout
from rankscope.bus.step import GatheredStep
from rankscope.bus.weighting import follow_tokens, undo_common_scale
from rankscope.stats.arrays import Floats
from rankscope.stats.spread import mean_and_std, weighted_mean_and_sem


class Losses(Combiner):
    """Losses of workers and micro-batches."""

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Fill in losses, weights and scales; return those of each micro-batch."""
        means_W = _as_means(messages_W)
        columns["loss_divided"][:] = means_W is not messages_W
        losses, weights = _losses(means_W, columns)
        columns["nonfinite"][:] |= [not np.isfinite(one.losses_U).all() for one in means_W]
        scales = tuple(_beside(one.multipliers_M, len(one.units_M)) for one in means_W)
        return {"micro_losses": losses, "micro_weights": weights, "micro_scales": scales}


def make_combiner(layout: Layout) -> Losses:
    """Return the combiner of losses."""
    return Losses()


def derive(gathered: GatheredStep) -> Derived:
    """Return the mean loss, weighted as in the reduction."""
    losses_W = gathered.workers["loss"]
    loss_mean, _ = mean_and_std(losses_W)
    scales_W = gathered.workers["grad_scale"]
    finite = np.isfinite(losses_W).all()
    if finite and follow_tokens(scales_W, gathered.workers["loss_weight"]):
        loss_mean = float(np.average(losses_W, weights=np.abs(scales_W)))
    return Derived({"loss_mean": loss_mean})


amend = undo_common_scale
"""Divides gradients by the common multiplier of all losses, once the step is complete."""


def _as_means(messages_W: Sequence[Message]) -> Sequence[Message]:
    """Treat losses as means over label tokens where they are proven to be.

    They are if each is a sum over label tokens, divided by the number of label tokens in all
    micro-batches of all workers.
    """
    if not all(0 < len(m.sums_M4) == 4 * len(m.units_M) for m in messages_W):
        return messages_W
    tables = [message.sums_M4.reshape(-1, 4) for message in messages_W]
    count_S, divisor_S, _, _ = np.concatenate(tables).T
    total = float(count_S.sum())
    if not (total > 0 and np.isclose(divisor_S, total, rtol=1e-6, atol=0.0).all()):
        return messages_W
    return [
        message.replace(
            losses_U=table[:, 2],
            weights_U=table[:, 0],
            units_M=np.ones(len(table), np.int64),
            multipliers_M=table[:, 3],
        )
        for message, table in zip(messages_W, tables, strict=True)
    ]


def _losses(
    messages_W: Sequence[Message], columns: Columns
) -> tuple[tuple[Floats, ...], tuple[Floats, ...]]:
    """Fill the workers' losses in; return those of each micro-batch, and their weights."""
    losses = []
    weights = []
    for rank, message in enumerate(messages_W):
        count = len(message.units_M)
        own = np.full(count, np.nan)
        own_weights = np.full(count, np.nan)
        if count:
            whole = _loss_values(message.losses_U, message.weights_U)
            if count > 1 and _knows_multipliers(message):
                whole["loss"], whole["loss_sem"] = weighted_mean_and_sem(
                    message.losses_U, _trained_weights(message)
                )
            fill(columns, rank, whole)
            ends = np.cumsum(message.units_M)
            for micro, (begin, end) in enumerate(zip(ends - message.units_M, ends, strict=True)):
                one = (
                    whole
                    if count == 1
                    else _loss_values(message.losses_U[begin:end], message.weights_U[begin:end])
                )
                own[micro] = one["loss"]
                own_weights[micro] = one["loss_weight"]
        if len(message.multipliers_M):
            fill(columns, rank, {"grad_scale": float(message.multipliers_M.sum())})
        losses.append(own)
        weights.append(own_weights)
    return tuple(losses), tuple(weights)


def _loss_values(losses_U: Floats, weights_U: Floats) -> dict[str, float]:
    loss, sem = weighted_mean_and_sem(losses_U, weights_U)
    return {"loss": loss, "loss_sem": sem, "loss_weight": float(weights_U.sum())}


def _knows_multipliers(message: Message) -> bool:
    """Return whether the multipliers of all micro-batches are known, and some are not zero."""
    multipliers_M = message.multipliers_M
    known = len(multipliers_M) == len(message.units_M) and np.isfinite(multipliers_M).all()
    return bool(known and multipliers_M.any())


def _trained_weights(message: Message) -> Floats:
    """Return the weight of each unit in the trained loss ``[U]``.

    A micro-batch counts by the multiplier of its loss, whatever its tokens; units of one
    micro-batch count by their tokens.
    """
    micro_U = np.repeat(np.arange(len(message.units_M)), message.units_M)
    known = np.isfinite(message.weights_U).all()
    tokens_U = message.weights_U if known else np.ones(len(micro_U))
    tokens_M = np.bincount(micro_U, tokens_U, len(message.units_M))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights_U: Floats = tokens_U * (np.abs(message.multipliers_M) / tokens_M)[micro_U]
    return np.where(tokens_U > 0, weights_U, 0.0)


def _beside(values_M: Floats, count: int) -> Floats:
    return values_M if len(values_M) == count else np.full(count, np.nan)
