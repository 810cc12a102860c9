"""The signal registry: the one place where a column of a run is declared.

The record's schema, the payload that travels between workers, the detectors, the report and the
exporters all read these declarations. To add a column, add a ``Signal`` here and give its value
where the other values of the same source are given; no other code lists columns.
"""

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rankscope.core.arrays import digest_of
from rankscope.errors import UsageError


class Table(StrEnum):
    """The tables of a run directory, one folder of Parquet files each."""

    STEPS = "steps"
    WORKERS = "workers"
    MICRO = "micro"
    SAMPLES = "samples"
    PAIRS = "pairs"
    GROUPS = "groups"
    DIGESTS = "digests"
    TRACES = "traces"


class DType(StrEnum):
    """The types that a column can have."""

    INT = "int64"
    FLOAT = "float64"
    BOOL = "bool"
    TEXT = "string"
    INTS = "list<int64>"
    FLOATS = "list<float32>"


class Source(StrEnum):
    """Where a value comes from, and so how it is gathered."""

    KEY = "key"
    """Names the row: step, rank, micro-batch."""
    LOCAL = "local"
    """Known of each worker by itself: measured by it, or computed by the agent from what it sends."""
    SEQUENCE = "sequence"
    """The same, of variable length."""
    DERIVED = "derived"
    """Computed from the values of all workers."""


class Tail(StrEnum):
    """Which direction of a signal is suspicious in a worker that differs from the others.

    Sinks show columns of any tail but ``NONE``.
    """

    NONE = "none"
    LOW = "low"
    HIGH = "high"
    BOTH = "both"


class Compares(StrEnum):
    """Which search compares the workers in a signal."""

    RESULTS = "results"
    """What a worker makes of what it is given: loss, gradient."""
    AMOUNTS = "amounts"
    """How much it is given."""
    ROLLOUTS = "rollouts"
    """What draws the completions that it trains on."""


class Compared(NamedTuple):
    """How detectors compare the workers in a signal.

    Attributes:
        label: Its name in findings.
        relative: Whether a deviation is told as a part of the median where all values are
            positive; else always as an absolute difference.
        observed: Whether only steps whose gradients were measured have it.
        by: Which search compares them.
    """

    label: str
    relative: bool = True
    observed: bool = True
    by: Compares = Compares.RESULTS


@dataclass(frozen=True, slots=True)
class Signal:
    """The declaration of one column.

    Attributes:
        name: Column name, stable across releases of one schema version.
        table: The table that holds it.
        dtype: Its type. Undefined values are null, never a silent 0 or NaN.
        unit: Unit of the value; empty for dimensionless ones.
        meaning: One line in plain words, shown in docs and reports.
        source: Where the value comes from.
        tail: Which direction is suspicious.
        compared: How detectors look for workers that differ in it; None where they do not.
    """

    name: str
    table: Table
    dtype: DType
    unit: str
    meaning: str
    source: Source
    tail: Tail = Tail.NONE
    compared: Compared | None = None

    @property
    def is_quantity(self) -> bool:
        """Whether a mean over steps says something: an amount, not a name, a digest or a flag."""
        counted = self.dtype is DType.INT and bool(self.unit)
        return self.source is not Source.KEY and (self.dtype is DType.FLOAT or counted)


def _declare(table: Table, *rows: tuple[Any, ...]) -> tuple[Signal, ...]:
    """Return signals from rows: name, type, unit, source, tail, meaning and, if any, compared."""
    return tuple(
        Signal(name, table, dtype, unit, meaning, source, tail, *compared)
        for name, dtype, unit, source, tail, meaning, *compared in rows
    )


_INT, _FLOAT, _BOOL, _INTS, _FLOATS = DType.INT, DType.FLOAT, DType.BOOL, DType.INTS, DType.FLOATS
_TEXT = DType.TEXT
_KEY, _LOCAL, _SEQ, _DERIVED = Source.KEY, Source.LOCAL, Source.SEQUENCE, Source.DERIVED
_NONE, _LOW, _HIGH, _BOTH = Tail.NONE, Tail.LOW, Tail.HIGH, Tail.BOTH

# fmt: off
SIGNALS: tuple[Signal, ...] = (
    *_declare(
        Table.STEPS,
        ("step", _INT, "", _KEY, _NONE, "backward passes that synchronised gradients, from 0"),
        ("time", _FLOAT, "s", _KEY, _NONE, "Unix time at which rank 0 gathered the step"),
        ("observed", _BOOL, "", _KEY, _NONE, "whether gradients were measured in this step"),
        ("loss_mean", _FLOAT, "nats/token", _DERIVED, _NONE, "mean of the workers' losses, each weighted as in the reduction: what dashboards show"),
        ("loss_std", _FLOAT, "nats/token", _DERIVED, _BOTH, "loss dispersion: population std over workers"),
        ("loss_range", _FLOAT, "nats/token", _DERIVED, _BOTH, "largest minus smallest loss over workers"),
        ("loss_std_expected", _FLOAT, "nats/token", _DERIVED, _NONE, "loss std that sampling alone would give, from the spread within workers"),
        ("grad_norm_mean", _FLOAT, "", _DERIVED, _NONE, "mean of the workers' local gradient norms"),
        ("grad_norm_std", _FLOAT, "", _DERIVED, _BOTH, "gradient-norm dispersion: population std over workers"),
        ("cosine_mean", _FLOAT, "", _DERIVED, _BOTH, "gradient-direction consistency: mean cosine over pairs of workers"),
        ("grad_norm_reduced", _FLOAT, "", _DERIVED, _NONE, "L2 norm of the reduced gradient, before any clipping: what dashboards show"),
        ("cosine_weighted", _FLOAT, "", _DERIVED, _BOTH, "mean cosine over pairs, weighted by the product of their norms"),
        ("cosine_min", _FLOAT, "", _DERIVED, _LOW, "smallest cosine over pairs of workers"),
        ("directions_undefined", _INT, "workers", _DERIVED, _HIGH, "workers whose gradient is zero or not finite and so has no direction"),
        ("reduction_residual", _FLOAT, "", _DERIVED, _HIGH, "relative distance of the reduced gradient from the mean of the workers' gradients"),
        ("samples_drawn", _INT, "samples", _DERIVED, _NONE, "samples in the global batch"),
        ("samples_distinct", _INT, "samples", _DERIVED, _LOW, "different samples in the global batch"),
        ("interval", _INT, "steps", _DERIVED, _NONE, "gradients are measured in steps that are multiples of this"),
        ("overhead_seconds", _FLOAT, "s", _DERIVED, _HIGH, "time the monitor took from training: the slowest worker's"),
    ),
    *_declare(
        Table.WORKERS,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("rank", _INT, "", _KEY, _NONE, "rank of the worker in its data-parallel group"),
        ("loss", _FLOAT, "nats/token", _LOCAL, _BOTH, "local loss per label token, before averaging; micro-batches count as they do in the gradient", Compared("loss", observed=False)),
        ("loss_weight", _FLOAT, "tokens", _LOCAL, _NONE, "label tokens behind the loss, or the weight that was given", Compared("label tokens", observed=False, by=Compares.AMOUNTS)),
        ("loss_divided", _BOOL, "", _LOCAL, _NONE, "whether the training sums its loss over label tokens and divides it by those of all workers, as all workers' counts prove"),
        ("loss_sem", _FLOAT, "nats/token", _LOCAL, _NONE, "standard error of the local loss, from its micro-batches or samples"),
        ("grad_norm", _FLOAT, "", _LOCAL, _BOTH, "L2 norm of the local gradient, before the reduction", Compared("gradient norm")),
        ("grad_norm_estimated", _BOOL, "", _LOCAL, _NONE, "whether grad_norm is an estimate, since the gradient was only seen in parts: ZeRO 2 and 3 or order_free with accumulation"),
        ("grad_max", _FLOAT, "", _LOCAL, _BOTH, "largest magnitude of an element of the local gradient"),
        ("grad_nonfinite", _INT, "elements", _LOCAL, _HIGH, "elements of the local gradient that are infinite or NaN"),
        ("grad_scale", _FLOAT, "", _LOCAL, _BOTH, "what the loss was multiplied by before backward (scaler, accumulation), summed over micro-batches; its median over workers is undone in all gradient columns"),
        ("grad_carried_over", _BOOL, "", _LOCAL, _HIGH, "whether the gradient was not zeroed before the step: then it is not measured"),
        ("grad_left_over", _BOOL, "", _LOCAL, _HIGH, "whether the step's first backward pass added to a gradient that the optimizer had applied before"),
        ("accumulator_change", _FLOAT, "", _LOCAL, _HIGH, "relative change of the accumulated gradient's norm from the end of one micro-batch's backward pass to the beginning of the next, the largest of the step; DDP with no_sync, FSDP2 (of this rank's shards where each pass reduces), DeepSpeed (of shards under ZeRO 2 and 3), no wrapper"),
        ("accumulator_scale", _FLOAT, "", _LOCAL, _NONE, "that norm at the beginning over that at the end: 1 if nothing happened, 0 if it was reset"),
        ("accumulator_micro", _INT, "", _LOCAL, _NONE, "the first micro-batch before which it changed most, from 0"),
        ("reduced_norm", _FLOAT, "", _LOCAL, _NONE, "L2 norm of the part of the reduced gradient that this worker holds"),
        ("cosine_rest", _FLOAT, "", _DERIVED, _LOW, "cosine between this worker's gradient and the sum of all others'", Compared("direction", relative=False)),
        ("nonfinite", _BOOL, "", _LOCAL, _HIGH, "whether the local loss or gradient holds an infinity or NaN"),
        ("num_samples", _INT, "samples", _LOCAL, _NONE, "samples in the local batch", Compared("number of samples", observed=False, by=Compares.AMOUNTS)),
        ("rollout_gap", _FLOAT, "nats/token", _LOCAL, _HIGH, "mean absolute difference between the log-probabilities that the trainer and the rollout give to the tokens that the rollout drew; null unless both are at hand", Compared("gap to the rollout's log-probabilities", observed=False, by=Compares.ROLLOUTS)),
        ("sequence_length", _FLOAT, "tokens", _LOCAL, _NONE, "tokens per sample that enter the model, padding included: the mean over samples; null unless token ids do", Compared("sequence length", observed=False, by=Compares.AMOUNTS)),
        ("padding", _FLOAT, "", _LOCAL, _NONE, "share of these tokens that the attention mask leaves out; null without a mask", Compared("share of padding", relative=False, observed=False, by=Compares.AMOUNTS)),
        ("micro_batches", _INT, "micro-batches", _LOCAL, _NONE, "forward passes behind the local gradient"),
        ("samples_named", _BOOL, "", _LOCAL, _NONE, "whether the training names its samples; else digests of their content stand for them"),
        ("batch_digest", _INT, "", _LOCAL, _NONE, "digest of the set of samples in the local batch"),
        ("lr", _FLOAT, "", _LOCAL, _BOTH, "learning rate of the optimizer's first parameter group"),
        ("weight_decay", _FLOAT, "", _LOCAL, _BOTH, "weight decay of the optimizer's first parameter group"),
        ("rates_digest", _INT, "", _LOCAL, _NONE, "digest of the learning rates of the optimizer's other parameter groups; null when there is one group"),
        ("settings_digest", _INT, "", _LOCAL, _NONE, "digest of all other settings of all parameter groups of the optimizer"),
        ("optimizer_steps", _INT, "", _LOCAL, _LOW, "calls of optimizer.step since the step before"),
        ("unreduced", _BOOL, "", _LOCAL, _HIGH, "whether optimizer.step was called with gradients that no reduction had seen"),
        ("replica", _INT, "", _LOCAL, _NONE, "workers with equal numbers hold the same parameters and optimizer state; null where these have one owner each"),
        ("state_layout", _INT, "", _LOCAL, _NONE, "digest of names, shapes and types of parameters, buffers and optimizer state"),
        ("param_digest", _INT, "", _LOCAL, _NONE, "digest of the parameters whose turn it was, after the step; null where each has one owner"),
        ("buffer_digest", _INT, "", _LOCAL, _NONE, "digest of the buffers whose turn it was, after the step"),
        ("optimizer_digest", _INT, "", _LOCAL, _NONE, "digest of the optimizer's state for the parameters whose turn it was, after the step"),
        ("reduced_digest", _INT, "", _LOCAL, _NONE, "digest of the gradients whose turn it was, right after the reduction"),
        ("applied_digest", _INT, "", _LOCAL, _NONE, "digest of the same gradients when optimizer.step was called"),
        ("applied_scale", _FLOAT, "", _LOCAL, _BOTH, "norm of these gradients when optimizer.step was called, over their norm right after the reduction: below 1 when clipped"),
        ("applied_odd", _FLOAT, "", _LOCAL, _BOTH, "factor by which some of these gradients were scaled, over that of most; 1 if all have one, as when they are clipped or unscaled"),
        ("precision", _INT, "", _LOCAL, _NONE, "digest of the precision of the forward pass: types of parameters, autocast, TF32, determinism"),
        ("rng_used", _INT, "", _LOCAL, _NONE, "random generators that moved in the forward pass: a sum of 1 Python, 2 numpy, 4 torch on the CPU, 8 the accelerator's; of those that moved since the passes of the step before, 16 times as much"),
        ("rng_digest", _INT, "", _LOCAL, _NONE, "digest of the states of torch's generators before the first forward pass, of those that moved; null when none did"),
        ("rng_digest_python", _INT, "", _LOCAL, _NONE, "the same of Python's generator"),
        ("rng_digest_numpy", _INT, "", _LOCAL, _NONE, "the same of numpy's global generator"),
        ("rng_private", _INT, "", _LOCAL, _NONE, "digest of the states of generators that modules and the data set hold for themselves, of those that moved since the step before; null when none did"),
        ("loader_rng_python", _INT, "", _LOCAL, _NONE, "digest of the states in which this rank's data-loader workers found Python's generator; null unless they use it"),
        ("loader_rng_numpy", _INT, "", _LOCAL, _NONE, "the same of numpy's global generator"),
        ("loader_rng_torch", _INT, "", _LOCAL, _NONE, "the same of torch's generator on the CPU"),
        ("loader_rng_repeats", _INT, "", _LOCAL, _NONE, "generators that start in equal states in two or more data-loader workers of this rank: a sum of 1 Python, 2 numpy, 4 torch; null unless they use any"),
        ("canary_of", _INT, "", _LOCAL, _NONE, "in a canary step: the rank whose batch every worker replayed"),
        ("canary_loss", _FLOAT, "nats/token", _LOCAL, _NONE, "loss of that batch, or a projection of the outputs where the model returns no loss"),
        ("canary_norm", _FLOAT, "", _LOCAL, _NONE, "L2 norm of its gradient"),
        ("canary_digest", _INT, "", _LOCAL, _NONE, "digest of all bits of its loss and gradient"),
        ("canary_again", _INT, "", _LOCAL, _NONE, "the same of a second run of the same batch"),
        ("canary_against", _INT, "", _LOCAL, _NONE, "the rank whose batch every worker replayed as well"),
        ("canary_against_loss", _FLOAT, "nats/token", _LOCAL, _NONE, "loss of that batch"),
        ("canary_against_norm", _FLOAT, "", _LOCAL, _NONE, "L2 norm of its gradient"),
        ("canary_against_digest", _INT, "", _LOCAL, _NONE, "digest of all bits of its loss and gradient"),
        ("canary_seconds", _FLOAT, "s", _LOCAL, _NONE, "time that the canary took from this worker, which is no part of overhead_seconds"),
        ("step_seconds", _FLOAT, "s", _LOCAL, _HIGH, "wall time since the step before"),
        ("busy_seconds", _FLOAT, "s", _LOCAL, _HIGH, "time from the end of the reduction before until this worker's last local gradient was ready, so before it began to wait for the others; DDP on the CPU"),
        ("overhead_seconds", _FLOAT, "s", _LOCAL, _HIGH, "time the monitor took from this worker's training thread; on an accelerator, from its stream"),
        ("read_seconds", _FLOAT, "s", _LOCAL, _NONE, "the part of overhead_seconds in which gradients were read"),
    ),
    *_declare(
        Table.MICRO,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("rank", _INT, "", _KEY, _NONE, "as in workers"),
        ("micro", _INT, "", _KEY, _NONE, "micro-batch inside the step, from 0"),
        ("loss", _FLOAT, "nats/token", _SEQ, _NONE, "local loss of the micro-batch per label token"),
        ("loss_weight", _FLOAT, "tokens", _SEQ, _NONE, "label tokens in the micro-batch"),
        ("grad_norm", _FLOAT, "", _SEQ, _NONE, "L2 norm of the micro-batch's own local gradient; all but the first of a step are estimates"),
        ("loss_scale", _FLOAT, "", _SEQ, _NONE, "what the micro-batch's loss was multiplied by before backward"),
    ),
    *_declare(
        Table.SAMPLES,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("rank", _INT, "", _KEY, _NONE, "as in workers"),
        ("samples", _INTS, "", _SEQ, _NONE, "one id or content digest per sample of the local batch"),
    ),
    *_declare(
        Table.PAIRS,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("cosines", _FLOATS, "", _DERIVED, _NONE, "cosines of all pairs i < j, row by row (W <= 64)"),
    ),
    *_declare(
        Table.GROUPS,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("rank", _INT, "", _KEY, _NONE, "as in workers"),
        ("group", _TEXT, "", _KEY, _NONE, "group of parameters: a transformer block, the embedding, the head"),
        ("grad_norm", _FLOAT, "", _SEQ, _BOTH, "L2 norm of the group's local gradient", Compared("gradient norm")),
        ("cosine_rest", _FLOAT, "", _DERIVED, _LOW, "cosine between the group's local gradient and the sum of all other workers'", Compared("direction", relative=False)),
        ("reduction_residual", _FLOAT, "", _DERIVED, _HIGH, "relative distance of the group's reduced gradient on this rank from the mean of the workers' gradients: the largest among parts of at most 10 M elements"),
        ("accumulator_change", _FLOAT, "", _SEQ, _HIGH, "as in workers, of the group's gradient; null where none of the step's has changed"),
    ),
    *_declare(
        Table.DIGESTS,
        ("step", _INT, "", _KEY, _NONE, "as in steps"),
        ("rank", _INT, "", _KEY, _NONE, "as in workers"),
        ("kind", _TEXT, "", _KEY, _NONE, "parameter, buffer, optimizer, reduced or applied (gradient), or another kind of state"),
        ("name", _TEXT, "", _KEY, _NONE, "what was compared, by its name in the model; only what differs between workers is recorded"),
        ("digest", _INT, "", _SEQ, _NONE, "digest of its bits on this worker; of a role, its bits"),
        ("unchanged", _BOOL, "", _SEQ, _NONE, "for a reduced gradient: whether the reduction left the local gradient's bits as they were; for a resting parameter: whether it rests still"),
    ),
    *_declare(
        Table.TRACES,
        ("step", _INT, "", _KEY, _NONE, "as in steps; the rows of the step before the first hold what was there at the beginning"),
        ("kind", _TEXT, "", _KEY, _NONE, "parameter (after the step) or reduced (gradient, right after the reduction), on rank 0; at the beginning also buffer and optimizer"),
        ("name", _TEXT, "", _KEY, _NONE, "the parameter's name in the model"),
        ("digest", _INT, "", _DERIVED, _NONE, "digest of its bits"),
        ("norm", _FLOAT, "", _DERIVED, _NONE, "its L2 norm; null for an optimizer's state"),
        ("sketch", _FLOATS, "", _DERIVED, _NONE, "its linear sketch, 61 numbers, none without a finite norm: the difference of two runs' sketches is the sketch of the difference"),
    ),
)
# fmt: on

_BY_NAME = {(signal.table, signal.name): signal for signal in SIGNALS}
assert len(_BY_NAME) == len(SIGNALS), "a column is declared twice"


def signals(table: Table, *sources: Source) -> tuple[Signal, ...]:
    """Return the columns of one table in order, all or those of the given sources."""
    return tuple(
        signal
        for signal in SIGNALS
        if signal.table is table and (not sources or signal.source in sources)
    )


def compared_signals(table: Table) -> tuple[Signal, ...]:
    """Return the columns of one table in which detectors compare the workers, in order."""
    return tuple(signal for signal in signals(table) if signal.compared is not None)


def signal(table: Table, name: str) -> Signal:
    """Return the declaration of one column.

    Raises:
        UsageError: There is no such column.
    """
    try:
        return _BY_NAME[table, name]
    except KeyError:
        there = [each for each in Table if (each, name) in _BY_NAME]
        elsewhere = f" ({name} is a column of {', '.join(there)})" if there else ""
        expected = ", ".join(each.name for each in signals(table))
        raise UsageError(
            f"expected columns of {table}, got {name!r}{elsewhere}; it has {expected}"
        ) from None


@functools.cache
def schema_hash() -> int:
    """Return a 63-bit digest of all declarations; equal on workers that can talk to each other."""
    text = "\n".join(f"{s.table} {s.name} {s.dtype} {s.source}" for s in SIGNALS)
    return digest_of(text.encode())
