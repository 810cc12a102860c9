"""Runs on disk of a small training in numpy, so that tests can change one thing in one step.

The model is three vectors that are pulled towards the samples of each batch; workers' gradients are
added up in a given order, in float32.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.replicas import TRACE_WIDTH, StateDifference, StateKind, TensorTrace
from rankscope.bus.step import MISSING_INT, GatheredStep, StepReport
from rankscope.evidence import columns_of
from rankscope.record import Run, RunWriter

SIZES = {"embedding": 305, "layers.0": 244, "head": 122}
NUMPY = {DType.INT: np.int64, DType.FLOAT: np.float64, DType.BOOL: np.bool_}
MISSING = {DType.INT: MISSING_INT, DType.FLOAT: np.nan, DType.BOOL: False}
BATCH = 8

Tensors = dict[str, np.ndarray]


def own_part(step: int, rank: int) -> int:
    return rank


def nothing(*_: Any) -> None:
    pass


@dataclass
class Training:
    """A training and what is odd about it.

    Attributes:
        workers: W.
        steps: T.
        first: Number of the first step.
        seed: Of the initial parameters.
        data: Of the order of the samples.
        lr: Learning rate, or one per step.
        order: In which order gradients are added up.
        random: What the random generators' digest is made of, if they are used.
        deal: By step and rank, whose part of the global batch a worker gets.
        touch: Called with (step, moment, tensors) and may change tensors in place; the moments are
            ``reduced`` and ``parameter``.
        touch_local: Called with (step, rank, gradient) likewise.
        traced: Whether the run has traces.
        named: Whether samples are recorded.
        disagreements: By step, a kind, a name and the odd rank.
        info: What ``run.json`` says besides.
        start: Parameters to begin with, if not those of the seed.
        offset: The step of the training itself that the first step is.
    """

    workers: int = 4
    steps: int = 10
    first: int = 0
    seed: int = 0
    data: int = 0
    lr: float | Callable[[int], float] = 0.05
    order: Sequence[int] = ()
    random: str | None = None
    deal: Callable[[int, int], int] = own_part
    touch: Callable[[int, str, Tensors], None] = nothing
    touch_local: Callable[[int, int, Tensors], None] = nothing
    traced: bool = True
    named: bool = True
    disagreements: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    start: Tensors | None = None
    offset: int = 0


def samples_of(training: Training, step: int, rank: int) -> np.ndarray:
    part = BATCH // training.workers
    order = np.random.default_rng(training.data).permutation(1000)
    at = step * BATCH + training.deal(step, rank) * part
    return order[at : at + part].astype(np.int64)


def target(sample: int, name: str) -> np.ndarray:
    rng = np.random.default_rng((int(sample), len(name)))
    return rng.normal(size=SIZES[name]).astype(np.float32)


def initial(seed: int) -> Tensors:
    rng = np.random.default_rng((99, seed))
    return {name: rng.normal(size=size).astype(np.float32) for name, size in SIZES.items()}


def write_training(path: Path, training: Training) -> Run:
    """Train, record, and return the open run."""
    info = {"num_workers": training.workers, "options": {"tier": "sketch"}, **training.info}
    writer = RunWriter(path, info)
    parameters = {n: v.copy() for n, v in (training.start or initial(training.seed)).items()}
    for index in range(training.steps):
        step = training.first + index
        before = {name: value.copy() for name, value in parameters.items()}
        report = _train(training, training.offset + index, step, parameters)
        if training.traced:
            trace = report["trace"]
            if index == 0:
                trace = TensorTrace(*_fields(trace), initial=_trace(before, StateKind.PARAMETER))
            report["trace"] = trace
        writer.add(_report(training, step, **report))
    writer.close()
    return Run.open(path)


def _train(training: Training, step: int, recorded: int, parameters: Tensors) -> dict[str, Any]:
    width = training.workers
    batches = [samples_of(training, step, rank) for rank in range(width)]
    locals_, losses = [], []
    for rank, batch in enumerate(batches):
        gradient = {
            name: np.mean([value - target(s, name) for s in batch], axis=0, dtype=np.float32)
            for name, value in parameters.items()
        }
        training.touch_local(recorded, rank, gradient)
        loss = np.float32(np.mean([_loss(parameters, s) for s in batch]))
        locals_.append(gradient)
        losses.append(float(loss))
    order = training.order or range(width)
    reduced = {}
    for name in parameters:
        total = np.zeros(SIZES[name], np.float32)
        for rank in order:
            total = (total + locals_[rank][name]).astype(np.float32)
        reduced[name] = (total / np.float32(width)).astype(np.float32)
    training.touch(recorded, "reduced", reduced)
    lr = training.lr(recorded) if callable(training.lr) else training.lr
    for name in parameters:
        parameters[name] -= (np.float32(lr) * reduced[name]).astype(np.float32)
    training.touch(recorded, "parameter", parameters)
    return {
        "batches": batches,
        "losses": losses,
        "norms": [_norm(gradient) for gradient in locals_],
        "reduced_norm": _norm(reduced),
        "lr": lr,
        "digests": {
            "reduced_digest": digest(reduced),
            "param_digest": digest(parameters),
        },
        "trace": _joined(
            _trace(reduced, StateKind.REDUCED), _trace(parameters, StateKind.PARAMETER)
        ),
    }


def _report(
    training: Training,
    step: int,
    *,
    batches: list[np.ndarray],
    losses: list[float],
    norms: list[float],
    reduced_norm: float,
    lr: float,
    digests: dict[str, int],
    trace: TensorTrace,
) -> StepReport:
    width = training.workers
    workers = {
        s.name: np.full(width, MISSING[s.dtype], NUMPY[s.dtype])
        for s in columns_of(Table.WORKERS, Source.LOCAL)
    }
    workers["loss"][:] = losses
    workers["loss_weight"][:] = BATCH // width
    workers["grad_norm"][:] = norms
    workers["reduced_norm"][:] = reduced_norm
    workers["lr"][:] = lr
    workers["settings_digest"][:] = int(lr * 1e9)
    workers["state_layout"][:] = 7
    for name, value in digests.items():
        workers[name][:] = value
    if training.random is not None:
        for rank in range(width):
            workers["rng_digest"][rank] = word(f"{training.random} {step} {rank}".encode())
    values = {s.name: np.nan for s in columns_of(Table.STEPS, Source.DERIVED)}
    values |= {"loss_mean": float(np.mean(losses)), "grad_norm_reduced": reduced_norm}
    differences = ()
    if step in training.disagreements:
        kind, name, rank = training.disagreements[step]
        own = np.where(np.arange(width) == rank, 5, 6)
        differences = (StateDifference(StateKind(kind), name, own, np.zeros(width, bool)),)
    gathered = GatheredStep(
        step=step,
        time=1e9 + step,
        observed=True,
        workers=workers,
        sketches_WK=None,
        samples=tuple(batches if training.named else [np.empty(0, np.int64)] * width),
        differences=differences,
        trace=trace if training.traced else None,
    )
    derived = {s.name: np.full(width, np.nan) for s in columns_of(Table.WORKERS, Source.DERIVED)}
    return StepReport(gathered, values, derived)


def flip(tensors: Tensors, name: str, index: int, bit: int) -> None:
    """Flip one bit of one element."""
    tensors[name].view(np.uint32)[index] ^= np.uint32(1 << bit)


def word(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def digest(tensors: Tensors) -> int:
    return word(b"".join(value.tobytes() for value in tensors.values()))


def _loss(parameters: Tensors, sample: int) -> float:
    return float(
        sum(0.5 * ((v - target(sample, n)).astype(np.float64) ** 2).sum()
            for n, v in parameters.items())
    )  # fmt: skip


def _norm(tensors: Tensors) -> float:
    return float(np.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in tensors.values())))


def _trace(tensors: Tensors, kind: StateKind) -> TensorTrace:
    return TensorTrace(
        tuple(kind for _ in tensors),
        tuple(tensors),
        np.array([word(value.tobytes()) for value in tensors.values()], np.int64),
        np.array([_norm({name: value}) for name, value in tensors.items()]),
        np.array([sketch(name, value) for name, value in tensors.items()], np.float32),
    )


def sketch(name: str, value: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(len(name)).choice([-1.0, 1.0], len(value))
    with np.errstate(over="ignore", invalid="ignore"):
        return (value.astype(np.float64) * signs).reshape(-1, TRACE_WIDTH).sum(axis=0)


def _joined(*traces: TensorTrace) -> TensorTrace:
    return TensorTrace(
        tuple(kind for trace in traces for kind in trace.kinds),
        tuple(name for trace in traces for name in trace.names),
        np.concatenate([trace.digests_N for trace in traces]),
        np.concatenate([trace.norms_N for trace in traces]),
        np.concatenate([trace.sketches_NK for trace in traces]),
    )


def _fields(trace: TensorTrace) -> tuple[Any, ...]:
    return trace.kinds, trace.names, trace.digests_N, trace.norms_N, trace.sketches_NK
