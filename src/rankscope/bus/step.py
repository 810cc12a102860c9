"""One step of all workers: the gathered values, and the report derived from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.replicas import StateDifference, StateKind, TensorTrace
from rankscope.stats.arrays import MISSING_INT, Floats, Floats32, Ints
from rankscope.stats.direction import Consensus, from_upper_triangle, upper_triangle


def as_floats(values: NDArray[Any]) -> Floats:
    """Return values as floats, with NaN where an integer has no value."""
    if values.dtype.kind != "i":
        return values.astype(np.float64, copy=False)
    return np.where(values == MISSING_INT, np.nan, values.astype(np.float64))


@dataclass(frozen=True, slots=True)
class GatheredStep:
    """The raw values of one step from all W workers."""

    step: int  # step number
    time: float  # Unix time in seconds
    observed: bool  # whether gradients were measured
    # one array ``[W]`` per LOCAL signal of the workers table, of its declared type (float64, int64
    # or bool); NaN or ``MISSING_INT`` where a worker had no value
    workers: Mapping[str, NDArray[Any]]
    # linear sketches of the local gradients, or None when not observed
    sketches_WK: Floats32 | None
    samples: tuple[Ints, ...]  # one int64 array per worker: ids or content digests of its samples
    # one array per worker: the loss of each of its micro-batches
    micro_losses: tuple[Floats, ...] = ()
    micro_weights: tuple[Floats, ...] = ()  # one array per worker, beside ``micro_losses``
    # one array per worker: gradient norm of each micro-batch; empty when unknown
    micro_norms: tuple[Floats, ...] = ()
    # one array per worker, beside ``micro_losses``: the multiplier of each loss before backward
    micro_scales: tuple[Floats, ...] = ()
    # names of the parameter groups ``[G]``; empty when the step was not observed
    groups: tuple[str, ...] = ()
    group_norms_WG: Floats | None = None  # gradient norm by worker and group
    group_sketches_WGK: Floats32 | None = None  # narrow sketches by worker and group
    reduced_copies: int = 1  # how many workers hold each element of the reduced gradient
    # state that differs between workers that should hold the same
    differences: tuple[StateDifference, ...] = ()
    interval: int = 1  # sampling interval in force: gradients are measured in multiples of it
    # beyond 64 workers, the direction of each against all others
    consensus: Consensus | None = None
    # beyond 64 workers, the groups whose directions were compared, by index
    groups_in_turn: Ints | None = None
    # by worker and group, the relative distance of the reduced gradient that this worker holds from
    # the mean of the workers' gradients; None where it was not audited
    residuals_WG: Floats | None = None
    total_residuals_W: Floats | None = None  # the same of the whole gradient
    trace: TensorTrace | None = None  # rank 0's tensors, where they are traced; None on other ranks
    # by worker and group, the largest relative change of the accumulated gradient between two
    # micro-batches; None where nothing has changed, or nothing is known
    accumulator_changes_WG: Floats | None = None

    @property
    def num_workers(self) -> int:
        """W, the number of workers."""
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as the run records it: a row of ``steps``, W rows of ``workers``, and the pairs.

    The columns of the steps table are attributes too: ``report.cosine_mean``. A value that is
    undefined (for example a cosine with one worker) is NaN here and null in the record.

    Attributes:
        gathered: The values as the workers sent them.
        values: The steps table's columns by name.
        derived: The workers table's DERIVED columns by name, one float64 array ``[W]`` each.
        cosines_WW: Pairwise cosines, NaN where one gradient has no direction; None when the step
            was not observed.
        group_cosine_rest_WG: ``cosine_rest`` of each group; None when groups have no directions.
    """

    gathered: GatheredStep
    values: Mapping[str, float]
    derived: Mapping[str, Floats] = field(default_factory=dict)
    cosines_WW: Floats | None = None
    group_cosine_rest_WG: Floats | None = None

    @property
    def step(self) -> int:
        """Step number."""
        return self.gathered.step

    @property
    def time(self) -> float:
        """Unix time in seconds at which the step was gathered."""
        return self.gathered.time

    @property
    def observed(self) -> bool:
        """Whether gradients were measured."""
        return self.gathered.observed

    def __getattr__(self, name: str) -> float:
        if name.startswith("_") or name == "values" or name not in self.values:
            known = "" if name == "values" else f"; it has {', '.join(self.values)}"
            raise AttributeError(f"a step has no value {name!r}{known}")
        return self.values[name]


def reduced_norm(gathered: GatheredStep) -> float:
    """Return the norm of the reduced gradient, from the parts that the workers hold."""
    parts_W = gathered.workers["reduced_norm"]
    return math.sqrt(parts_W @ parts_W) / math.sqrt(gathered.reduced_copies)


MAX_PAIRED_WORKERS = 64
"""Workers up to which the cosines of all pairs are recorded: 2,016 pairs, 8 kB a step."""


def as_recorded(report: StepReport) -> StepReport:
    """Return a step with the bits that its record holds; without effect on a recorded step.

    Detectors see no more than the record, so that they find the same live and offline. It has no
    sketches; cosines in float32, up to 64 workers; micro-batches only where some worker had two or
    more, and their norms only if some were measured; groups only if there are two or more.
    """
    gathered = report.gathered
    groups = has_groups(gathered)
    micro = has_micro_batches(gathered)
    cosines_WW = report.cosines_WW
    if cosines_WW is not None:
        width = len(cosines_WW)
        pairs = upper_triangle(cosines_WW).astype(np.float32)
        paired = 2 <= width <= MAX_PAIRED_WORKERS
        cosines_WW = from_upper_triangle(pairs, width) if paired else None
    recorded = replace(
        gathered,
        sketches_WK=None,
        group_sketches_WGK=None,
        reduced_copies=1,
        consensus=None,
        groups_in_turn=None,
        trace=None,
        groups=gathered.groups if groups else (),
        group_norms_WG=gathered.group_norms_WG if groups else None,
        residuals_WG=unless_unknown(gathered.residuals_WG) if groups else None,
        accumulator_changes_WG=gathered.accumulator_changes_WG if groups else None,
        total_residuals_W=None,
        micro_losses=gathered.micro_losses if micro else (),
        micro_weights=gathered.micro_weights if micro else (),
        micro_norms=known_micro_norms(gathered) if micro else (),
        micro_scales=_unless_all_unknown(gathered.micro_scales) if micro else (),
    )
    return replace(
        report,
        gathered=recorded,
        cosines_WW=cosines_WW,
        group_cosine_rest_WG=unless_unknown(report.group_cosine_rest_WG) if groups else None,
    )


def has_micro_batches(step: GatheredStep) -> bool:
    """Return whether some worker had two or more micro-batches."""
    return max(map(len, step.micro_losses), default=0) >= 2


def trains_alone(step: GatheredStep) -> bool | None:
    """Return whether each worker's optimizer gets its own gradients; None where it is not known.

    No reduction has seen them, or one has left them as they were, as torch's for local SGD does. In
    a step that compares no trained parameter, nothing is known.
    """
    workers = step.workers
    if (workers["param_digest"] == MISSING_INT).any():
        return None
    reduced = [one for one in step.differences if one.kind is StateKind.REDUCED]
    if (workers["unreduced"] == 1).all():
        own = reduced or any(one.kind is StateKind.APPLIED for one in step.differences)
        return True if own else None
    if not reduced and (workers["reduced_digest"] == MISSING_INT).any():
        return None
    return bool(reduced) and all(one.unchanged_W.all() for one in reduced)


def has_groups(step: GatheredStep) -> bool:
    """Return whether there are two or more groups with norms."""
    return step.group_norms_WG is not None and len(step.groups) >= 2


def known_micro_norms(step: GatheredStep) -> tuple[Floats, ...]:
    """Return the norms beside the micro-batches' losses; empty when none is known."""
    if not has_micro_batches(step):
        return ()
    norms = step.micro_norms
    beside = [len(worker) for worker in norms] == [len(worker) for worker in step.micro_losses]
    return _unless_all_unknown(norms) if beside else ()


def _unless_all_unknown(values: tuple[Floats, ...]) -> tuple[Floats, ...]:
    return values if values and not np.isnan(np.concatenate(values)).all() else ()


def unless_unknown(values: Floats | None) -> Floats | None:
    """Return values; None where all of them are NaN."""
    return None if values is None or np.isnan(values).all() else values
