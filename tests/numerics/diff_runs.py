"""Runs of a training in numpy that pulls three vectors towards each batch's samples, in float32."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.evidence import Source, Table
from rankscope.bus.replicas import TRACE_WIDTH, StateDifference, StateKind, TensorTrace
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.evidence import columns_of
from rankscope.record import Run, RunWriter
from support.streams import gathered

SIZES = {"embedding": 305, "layers.0": 244, "head": 122}
BATCH = 8

Tensors = dict[str, np.ndarray]


def own_part(step: int, rank: int) -> int:
    return rank


def nothing(*_: Any) -> None:
    pass


@dataclass
class Training:
    workers: int = 4
    steps: int = 10
    first: int = 0  # number of the first step
    seed: int = 0  # of the initial parameters
    data: int = 0  # seed of the order of the samples
    lr: float | Callable[[int], float] = 0.05  # or one per step
    order: Sequence[int] = ()  # in which gradients are added up
    deal: Callable[[int, int], int] = own_part  # by step and rank: whose part a worker gets
    # Called with step, moment ("reduced" or "parameter") and tensors, which it may change in place.
    touch: Callable[[int, str, Tensors], None] = nothing
    touch_local: Callable[[int, int, Tensors], None] = nothing  # with step, rank, gradient
    traced: bool = True  # whether the run has traces
    ended: str = "complete"
    disagreements: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # of ``run.json``, besides
    start: Tensors | None = None  # parameters to begin with, if not those of the seed
    columns: dict[str, int] = field(default_factory=dict)  # of all workers and steps, besides
    loss_factor: float = 1.0  # of the recorded losses
    offset: int = 0  # the step of the training itself that the first step is


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
    info = {"num_workers": training.workers, "options": {"tier": "sketch"}, **training.info}
    writer = RunWriter(path, info)
    parameters = {n: v.copy() for n, v in (training.start or initial(training.seed)).items()}
    for index in range(training.steps):
        started = _trace({StateKind.PARAMETER: parameters}) if index == 0 else None
        step = _train(training, training.offset + index, training.first + index, parameters)
        if step.trace is not None:
            step = replace(step, trace=replace(step.trace, initial=started))
        writer.add(_report(step))
    writer.close(training.ended)
    return Run.open(path)


def _train(training: Training, step: int, recorded: int, parameters: Tensors) -> GatheredStep:
    width = training.workers
    batches = [samples_of(training, step, rank) for rank in range(width)]
    losses = [float(np.float32(np.mean([_loss(parameters, s) for s in b]))) for b in batches]
    locals_ = []
    for rank, batch in enumerate(batches):
        gradient = {
            name: np.mean([value - target(s, name) for s in batch], axis=0, dtype=np.float32)
            for name, value in parameters.items()
        }
        training.touch_local(recorded, rank, gradient)
        locals_.append(gradient)
    reduced = {}
    for name in parameters:
        total = np.zeros(SIZES[name], np.float32)
        for rank in training.order or range(width):
            total = (total + locals_[rank][name]).astype(np.float32)
        reduced[name] = (total / np.float32(width)).astype(np.float32)
    training.touch(recorded, "reduced", reduced)
    lr = training.lr(recorded) if callable(training.lr) else training.lr
    for name in parameters:
        parameters[name] -= (np.float32(lr) * reduced[name]).astype(np.float32)
    training.touch(recorded, "parameter", parameters)
    alike = {
        "loss_weight": BATCH // width,
        "reduced_norm": _norm(reduced),
        "lr": lr,
        "settings_digest": int(lr * 1e9),
        "state_layout": 7,
        # The number of a step chooses the tensors that it digests.
        "reduced_digest": digest(reduced) ^ recorded,
        "param_digest": digest(parameters) ^ recorded,
    }
    alike |= training.columns
    columns = {name: [value] * width for name, value in alike.items()}
    losses = [loss * training.loss_factor for loss in losses]
    norms = [_norm(gradient) for gradient in locals_]
    one = gathered(recorded, batches, loss=losses, grad_norm=norms, **columns)
    trace = _trace({StateKind.REDUCED: reduced, StateKind.PARAMETER: parameters})
    told, seen = _differences(training, recorded), trace if training.traced else None
    return replace(one, time=1e9 + recorded, observed=True, differences=told, trace=seen)


def _differences(training: Training, step: int) -> tuple[StateDifference, ...]:
    if step not in training.disagreements:
        return ()
    kind, name, rank = training.disagreements[step]
    own_W = np.where(np.arange(training.workers) == rank, 5, 6)
    return (StateDifference(StateKind(kind), name, own_W, np.zeros(training.workers, bool)),)


def _report(step: GatheredStep) -> StepReport:
    unknown_W = np.full(step.num_workers, np.nan)
    values = {s.name: np.nan for s in columns_of(Table.STEPS, Source.DERIVED)}
    values["loss_mean"] = float(np.mean(step.workers["loss"]))
    values["grad_norm_reduced"] = step.workers["reduced_norm"][0]
    derived = {s.name: unknown_W for s in columns_of(Table.WORKERS, Source.DERIVED)}
    return StepReport(step, values, derived)


def _trace(tensors: dict[StateKind, Tensors]) -> TensorTrace:
    rows = [(kind, n, v) for kind, of_kind in tensors.items() for n, v in of_kind.items()]
    kinds, names, values = zip(*rows, strict=True)
    return TensorTrace(
        kinds,
        names,
        np.array([word(value.tobytes()) for value in values], np.int64),
        np.array([_norm({name: value}) for _, name, value in rows]),
        np.array([sketch(name, value) for _, name, value in rows], np.float32),
    )


def flip(tensors: Tensors, name: str, index: int, bit: int) -> None:
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


def sketch(name: str, value: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(len(name)).choice([-1.0, 1.0], len(value))
    with np.errstate(over="ignore", invalid="ignore"):
        return (value.astype(np.float64) * signs).reshape(-1, TRACE_WIDTH).sum(axis=0)
