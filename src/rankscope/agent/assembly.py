"""From the messages of W workers to the step of all.

Steps are assembled in order. A step is there when every worker has delivered it; what a worker
that ended has not delivered never comes.
"""

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.layout import Layout
from rankscope.agent.message import StepMessage, columns_of
from rankscope.core.arrays import Floats, Ints
from rankscope.core.audit import residuals_of_all
from rankscope.core.direction import sum_shares
from rankscope.core.dispersion import weighted_mean_and_sem
from rankscope.core.measured import Measured, measured_of
from rankscope.core.own_reduction import reduced_between, undo_factor
from rankscope.core.replicas import (
    TRACE_WIDTH,
    StateDifference,
    StateDigests,
    StateKind,
    Trace,
    differences,
)
from rankscope.core.roles import Stillness, changed_gradients, resting, role_differences
from rankscope.core.step import MISSING_INT, GatheredStep, MeasuredGradient
from rankscope.core.weighting import undo_common_scale

_log = logging.getLogger("rankscope")

_Kinds = tuple[StateKind, ...]
_Named = tuple[_Kinds, tuple[str, ...]]


class Assembly:
    """Collects the workers' messages until a step is whole.

    Args:
        layout: How to read them.
        first_step: Number of the first step.
    """

    def __init__(self, layout: Layout, first_step: int) -> None:
        self._layout = layout
        self.next_step = first_step
        self.newest = first_step - 1
        self.lost: list[int] = []
        """Steps that some worker's message was lost of."""
        self.lost_of: Counter[int] = Counter()
        """How many of a rank's messages were lost."""
        self._queues: list[deque[StepMessage | None]]
        self._queues = [deque() for _ in range(layout.num_workers)]
        self._delivered = [first_step - 1] * layout.num_workers
        self._names: dict[int, _Named] = {}
        self._stillness = Stillness()

    @property
    def delivered(self) -> tuple[int, ...]:
        """The last step that each worker has delivered ``[W]``."""
        return tuple(self._delivered)

    @property
    def num_whole(self) -> int:
        """How many steps all workers have delivered that were not taken as yet."""
        return min(map(len, self._queues))

    def add(self, rank: int, message: StepMessage) -> None:
        """Take a message; one that is known already is left out."""
        if message.step <= self._delivered[rank]:
            return
        gap = message.step - self._delivered[rank] - 1
        if gap:
            self._note_lost(rank, message.step, gap)
        self._queues[rank].extend([None] * gap)  # lost on the way from another host
        self._delivered[rank] = message.step
        self.newest = max(self.newest, message.step)
        self._learn_names(rank, message)
        self._queues[rank].append(message)

    def _note_lost(self, rank: int, step: int, gap: int) -> None:
        if not self.lost_of:
            _log.warning(
                "what rank %d has measured up to step %d was lost on the way, of %d steps, which "
                "are not recorded: the link to its host was broken, or too slow. This is not said "
                "again, but counted in run.json for each rank",
                rank,
                step - 1,
                gap,
            )
        self.lost_of[rank] += gap

    def take(self, most: int) -> list[list[StepMessage]]:
        """Return the messages of the next steps that are whole, at most so many steps."""
        steps: list[list[StepMessage]] = []
        while len(steps) < most and all(self._queues):
            step, self.next_step = self.next_step, self.next_step + 1
            messages = [queue.popleft() for queue in self._queues]
            whole = [message for message in messages if message is not None]
            if len(whole) == len(messages):
                steps.append(whole)
            else:
                self.lost.append(step)
        return steps

    def step_of(self, messages_W: Sequence[StepMessage], interval: int) -> GatheredStep:
        """Return what all workers' messages of a step say together."""
        first, means_W = messages_W[0], _as_means(messages_W)
        divided, messages_W = means_W is not messages_W, means_W
        workers = columns_of([message.slots for message in messages_W])
        workers["loss_divided"][:] = divided
        losses, weights = _losses(messages_W, workers)
        measured_W = [self._measured(message) for message in messages_W]
        if self._layout.by_loop:
            measured_W = _as_reduced(measured_W)
        carried = [one is not None and one.values["grad_carried_over"] > 0 for one in measured_W]
        observed = all(
            one is not None and not c for one, c in zip(measured_W, carried, strict=True)
        )
        for rank, one in enumerate(measured_W):
            if one is not None:
                known = {"grad_carried_over": 1.0} if carried[rank] else one.values
                _fill(workers, rank, known)
        _fill_nonfinite(workers, messages_W)
        samples = tuple(message.samples_B for message in messages_W)
        _fill_samples(workers, samples)
        gathered = GatheredStep(
            step=first.step,
            time=max(
                (each.time for each in messages_W if math.isfinite(each.time)), default=time.time()
            ),
            observed=observed,
            workers=workers,
            samples=samples,
            micro_losses=losses,
            micro_weights=weights,
            micro_norms=tuple(
                np.empty(0) if one is None or carried[rank] else one.micro_norms
                for rank, one in enumerate(measured_W)
            ),
            micro_scales=tuple(
                _beside(message.multipliers_M, len(message.units_M)) for message in messages_W
            ),
            differences=(
                *self._differences(messages_W, workers["replica"]),
                *self._resting(messages_W, workers),
                *_told_by_name(messages_W),
            ),
            interval=interval,
            trace=self._trace(first),
            **(self._gradients(measured_W, messages_W) if observed else {"sketches_WK": None}),
        )
        return undo_common_scale(gathered)

    def _measured(self, message: StepMessage) -> Measured | None:
        if not message.measured:
            return None
        counts = self._layout.section_counts
        return measured_of(message.numbers, message.sketches, message.sizes, counts)

    def _gradients(
        self, measured_W: Sequence[Measured | None], messages_W: Sequence[StepMessage]
    ) -> dict[str, Any]:
        layout = self._layout
        known = [one for one in measured_W if one is not None]
        known_W = [one.gradient for one in known]
        residuals_WR = self._residuals(known_W) if layout.section_counts else None
        has_gram = len(messages_W[0].gram) > 0
        return {
            "groups": layout.groups,
            "accumulator_changes_WG": _changes(known),
            "group_norms_WG": np.stack([one.group_norms_G for one in known_W]),
            "sketches_WK": (
                np.stack([one.sketch_K for one in known_W]) if layout.sketch_width else None
            ),
            "group_sketches_WGK": (
                np.stack([one.group_sketches_GK for one in known_W]) if layout.group_width else None
            ),
            "gram_WW": sum_shares(np.stack([m.gram for m in messages_W])) if has_gram else None,
            "total_residuals_W": None if residuals_WR is None else residuals_WR[:, 0],
            "residuals_WG": None if residuals_WR is None else residuals_WR[:, 1:],
            "reduced_copies": layout.reduced_copies,
            "reduced_products_W": (
                np.array([one.reduced_product for one in known_W]) if layout.num_products else None
            ),
        }

    def _residuals(self, measured_W: Sequence[MeasuredGradient]) -> Floats:
        parts = [one.audit for one in measured_W if one.audit is not None]
        firsts = np.cumsum((0, *self._layout.section_counts[:-1])).astype(np.int64)
        return residuals_of_all(parts, firsts, self._layout.reduced_copies)

    # Names of what digests are of, which travel once ---------------------------------------------

    def _learn_names(self, rank: int, message: StepMessage) -> None:
        if rank != 0 or not len(message.names):
            return
        said = json.loads(message.names.tobytes())
        for items, kinds, names in said.get("items", ()):
            self._names[int(items)] = tuple(map(StateKind, kinds)), tuple(names)

    def _differences(self, messages_W: Sequence[StepMessage], replicas_W: Ints) -> Any:
        first = messages_W[0]
        if first.items not in self._names or any(m.items != first.items for m in messages_W):
            return ()
        kinds, names = self._names[first.items]
        own = StateDigests(kinds, names, first.digests_D, first.unchanged_D.astype(bool))
        return differences(
            own,
            np.stack([message.digests_D for message in messages_W]),
            np.stack([message.unchanged_D for message in messages_W]).astype(bool),
            replicas_W,
        )

    def _resting(
        self, messages_W: Sequence[StepMessage], workers: Mapping[str, NDArray[Any]]
    ) -> tuple[StateDifference, ...]:
        """Return the parameters of the first worker that do not change, as far as it tells."""
        first = messages_W[0]
        kinds, names = self._names.get(first.items, ((), ()))
        if len(kinds) != len(first.digests_D):
            return ()
        updates = bool(workers["optimizer_steps"][0] > 0 and workers["lr"][0] > 0)
        digests = first.digests_D.tolist()
        found = self._stillness.see(first.step, kinds, names, digests, updates=updates)
        return resting(found, len(messages_W))

    def _trace(self, message: StepMessage) -> Trace | None:
        """Return the tensors of the first worker, where they are traced; its message names them."""
        if not len(message.traced_digests_N):
            return None
        named = json.loads(message.names.tobytes())["traced"]
        parts = {
            what: (tuple(map(StateKind, kinds)), tuple(names))
            for what, (kinds, names) in named.items()
        }
        initial = parts.get("initial")
        count = 0 if initial is None else len(initial[0])
        before = None if initial is None else _tensors(message, *initial, 0)
        return replace(_tensors(message, *parts["own"], count), initial=before)


def _as_reduced(measured_W: Sequence[Measured | None]) -> list[Measured | None]:
    """Take what a loop has reduced by itself for the mean that it is a multiple of.

    One that reduces after each micro-batch adds to what was reduced: no gradient is local then.
    """
    known = [one for one in measured_W if one is not None]
    if len(known) == len(measured_W) and reduced_between([one.found_B for one in known]):
        return [one._replace(values={**one.values, "grad_carried_over": 1.0}) for one in known]
    parts = [one.gradient.audit for one in known if one.gradient.audit is not None]
    if not parts or len(parts) < len(measured_W):
        return list(measured_W)
    found = undo_factor(parts)
    return [
        one._replace(
            gradient=replace(one.gradient, audit=part),
            values={
                **one.values,
                "reduced_norm": math.sqrt(part.reduced_squares_S.sum()),
                "unreduced": float(unreduced),
            },
        )
        for one, part, unreduced in zip(known, found.parts_W, found.unreduced_W, strict=True)
    ]


def _changes(measured_W: Sequence[Measured]) -> Floats | None:
    """Return how accumulated gradients changed between micro-batches, if some did ``[W, G]``."""
    changes_WG = [one.changes_G for one in measured_W]
    if not all(len(changes_G) for changes_G in changes_WG):
        return None
    stacked = np.stack(changes_WG)
    return stacked if (stacked > 0).any() else None


def _told_by_name(messages_W: Sequence[StepMessage]) -> tuple[StateDifference, ...]:
    """Return gradients that were changed otherwise than most, and roles where all have looked."""
    if not any(len(message.names) for message in messages_W):
        return ()
    said_W = [json.loads(m.names.tobytes()) if len(m.names) else {} for m in messages_W]
    roles_W = [said.get("roles") for said in said_W]
    roles = role_differences([each for each in roles_W if each]) if all(roles_W) else ()
    return (*changed_gradients([said.get("changed", ()) for said in said_W]), *roles)


def _tensors(message: StepMessage, kinds: _Kinds, names: tuple[str, ...], begin: int) -> Trace:
    rows = slice(begin, begin + len(kinds))
    sketches = message.traced_sketches.reshape(-1, TRACE_WIDTH)
    return Trace(
        kinds, names, message.traced_digests_N[rows], message.traced_norms_N[rows], sketches[rows]
    )


def _as_means(messages_W: Sequence[StepMessage]) -> Sequence[StepMessage]:
    """Take losses for means over label tokens where they are proven to be.

    They are if each is a sum over label tokens, divided by the number of them in all micro-batches
    of all workers.
    """
    if not all(0 < len(m.sums_M4) == 4 * len(m.units_M) for m in messages_W):
        return messages_W
    tables = [message.sums_M4.reshape(-1, 4) for message in messages_W]
    count_S, divisor_S, _, _ = np.concatenate(tables).T
    total = float(count_S.sum())
    if not (total > 0 and np.isclose(divisor_S, total, rtol=1e-6, atol=0.0).all()):
        return messages_W
    return [
        replace(
            message,
            losses_U=table[:, 2],
            weights_U=table[:, 0],
            units_M=np.ones(len(table), np.int64),
            multipliers_M=table[:, 3],
        )
        for message, table in zip(messages_W, tables, strict=True)
    ]


def _losses(
    messages_W: Sequence[StepMessage], workers: Mapping[str, NDArray[Any]]
) -> tuple[tuple[Floats, ...], tuple[Floats, ...]]:
    """Fill the workers' losses in; return those of each micro-batch, and their weights."""
    losses, weights = [], []
    for rank, message in enumerate(messages_W):
        count = len(message.units_M)
        own, own_weights = np.full(count, np.nan), np.full(count, np.nan)
        if count:
            whole = _loss_values(message.losses_U, message.weights_U)
            if count > 1 and _says_what_counts(message):
                whole["loss"], whole["loss_sem"] = weighted_mean_and_sem(
                    message.losses_U, _trained_weights(message)
                )
            _fill(workers, rank, whole)
            ends = np.cumsum(message.units_M)
            for micro, (begin, end) in enumerate(zip(ends - message.units_M, ends, strict=True)):
                one = (
                    whole
                    if count == 1
                    else _loss_values(message.losses_U[begin:end], message.weights_U[begin:end])
                )
                own[micro], own_weights[micro] = one["loss"], one["loss_weight"]
        if len(message.multipliers_M):
            _fill(workers, rank, {"grad_scale": float(message.multipliers_M.sum())})
        losses.append(own)
        weights.append(own_weights)
    return tuple(losses), tuple(weights)


def _loss_values(losses_U: Floats, weights_U: Floats) -> dict[str, float]:
    loss, sem = weighted_mean_and_sem(losses_U, weights_U)
    return {"loss": loss, "loss_sem": sem, "loss_weight": float(weights_U.sum())}


def _says_what_counts(message: StepMessage) -> bool:
    """Return whether it is known what each micro-batch was multiplied by, and some count."""
    multipliers_M = message.multipliers_M
    known = len(multipliers_M) == len(message.units_M) and np.isfinite(multipliers_M).all()
    return bool(known and multipliers_M.any())


def _trained_weights(message: StepMessage) -> Floats:
    """Return how much each unit of a loss counts in what is trained on ``[U]``.

    A micro-batch counts as much as its loss was multiplied by before backward, whatever its tokens;
    units of one micro-batch count by their tokens.
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


def _fill(workers: Mapping[str, NDArray[Any]], rank: int, values: Mapping[str, float]) -> None:
    """Put a worker's values into the columns; NaN is missing."""
    for name, value in values.items():
        column = workers[name]
        if value == value:
            column[rank] = value
        else:
            column[rank] = MISSING_INT if column.dtype == np.int64 else np.nan


def _fill_nonfinite(workers: Mapping[str, NDArray[Any]], messages_W: Sequence[StepMessage]) -> None:
    counts = workers["grad_nonfinite"]
    known = (counts != MISSING_INT) if counts.dtype == np.int64 else np.isfinite(counts)
    bad_losses = [not np.isfinite(message.losses_U).all() for message in messages_W]
    workers["nonfinite"][:] = (known & (np.where(known, counts, 0) > 0)) | bad_losses


def _fill_samples(workers: Mapping[str, NDArray[Any]], samples_W: Sequence[Ints]) -> None:
    """Fill in how many samples each worker has, and a digest of which, in any order."""
    spread = _mix(np.concatenate(samples_W))
    end = 0
    for rank, samples in enumerate(samples_W):
        begin, end = end, end + len(samples)
        workers["num_samples"][rank] = len(samples)
        if len(samples):
            workers["batch_digest"][rank] = spread[begin:end].sum()


def _mix(samples: Ints) -> Ints:
    """Spread ids over 64 bits (the finaliser of SplitMix64), so that their sums tell sets apart."""
    bits = samples.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)
