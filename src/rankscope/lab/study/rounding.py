"""How rounding grows over a training: pairs that differ in the arithmetic of the reduction alone.

All trainings of an experiment begin with the same parameters and go step by step side by side in
one process, on one thread. The gradients of the micro-batches of a global batch are computed one
after the other, in the same way in each training; only the reduction that makes one gradient of
them is another one. So the same reduction twice gives the same bits, and what two trainings differ
by comes from the reduction.

Each sample's loss counts alike, whatever its length: the mean over micro-batches is then the same
number on 8 and on 16 workers, in exact arithmetic.

Legend: M micro-batches of one global batch, W workers, B buckets, P parameters.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.bus.groups import block_of
from rankscope.errors import UsageError
from rankscope.lab.numerics import Progress, no_progress
from rankscope.lab.numerics.gradients import LocalGradients
from rankscope.lab.numerics.summation import (
    Arithmetic,
    Scheme,
    num_buckets,
    reduce_buffers,
    to_buffers,
)
from rankscope.lab.study.base import (
    BASE_STEPS,
    BaseConfig,
    build,
    one_thread,
    train,
    train_tokenizer,
)
from rankscope.lab.study.config import Combination, Setting, ShardReading, StudyConfig
from rankscope.lab.study.data import load_records
from rankscope.lab.study.encoding import IGNORED, EncodedSet, draw_batches, encode
from rankscope.lab.study.models import load_model
from rankscope.lab.study.rounding_result import (
    BFLOAT16,
    CONTROL,
    DATA,
    FLOAT16,
    FLOAT16_SCALED,
    MODEL,
    ORDER,
    WORKERS,
    GrowthOptions,
    GrowthResult,
    PairResult,
    fit_growth,
)
from rankscope.stats.rounding import ulp_distance

MAX_STEP = 10_000


def record_gradients(
    num_workers: int,
    *,
    step: int = 0,  # steps to take before; 0 records the base model's gradients
    seed: int = 0,  # decides data, base model and batches
    base_steps: int = BASE_STEPS,  # of the base model's training
    progress: Progress = no_progress,
) -> LocalGradients:
    """Fine-tune the built-in model; return gradients of one step by parameter, float32 ``[W, n]``.

    The workers are computed one after the other in this process. Each draws batches from its own
    shard, as in a study with the sharded reading, and steps are taken with the study's optimizer
    on the mean of their gradients.
    """
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"expected a step from 0 to {MAX_STEP}, got {step}")
    total = (step + 1) * num_workers
    progress("base model", 0, total)
    config = StudyConfig(seed=seed)
    records = load_records(None, seed=seed)
    loaded = load_model(
        "tiny", seed=seed, tokenizer_records=records.held_out, base_steps=base_steps
    )
    samples = encode(records.records, loaded.tokenizer, config.max_length)
    workers = [
        draw_batches(
            Combination(ShardReading.SHARDED, Setting.S1_1),
            num_samples=len(samples),
            batch_size=config.batch_size,
            rank=rank,
            num_workers=num_workers,
            seed=seed,
        )
        for rank in range(num_workers)
    ]
    model = loaded.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.effective_learning_rate, weight_decay=0.0
    )
    for done in range(step):
        for rank, batches in enumerate(workers):
            progress(f"gradients of step {done}", done * num_workers + rank, total)
            _backward(model, samples, batches, num_workers)
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    arrays = {
        name: np.empty((num_workers, parameter.numel()), dtype=np.float32)
        for name, parameter in parameters.items()
    }
    for rank, batches in enumerate(workers):
        progress(f"gradients of step {step}", step * num_workers + rank, total)
        _backward(model, samples, batches)
        for name, parameter in parameters.items():
            assert parameter.grad is not None, name
            arrays[name][rank] = parameter.grad.flatten().numpy()
        optimizer.zero_grad()
    progress(f"gradients of step {step}", total, total)
    return LocalGradients("recorded", f"built-in model, step {step}", arrays)


def _backward(
    model: nn.Module, samples: EncodedSet, batches: Iterator[list[int]], divisor: int = 1
) -> None:
    """Add the gradient of one worker's next batch to the parameters' gradients."""
    inputs, _ = samples.collate(next(batches))
    loss: Any = model(**inputs).loss
    (loss / divisor).backward()


SMALL_CONFIG = BaseConfig(
    hidden=64, layers=2, heads=2, intermediate=176, vocab_size=1024, positions=128, train_length=96
)
MAX_LENGTH = 96
NUM_RECORDS = 2048
NUM_EVALUATED = 64
_EVALUATED_AT_ONCE = 16
BUCKET_ELEMENTS = 1 << 15  # about a fifth of these small models, as 25 MB of a model of 30 M


@dataclass(frozen=True, slots=True)
class Ingredients:
    """The parts that all trainings of an experiment share; ``facts`` are shown to readers."""

    make_model: Callable[[], nn.Module]
    samples: EncodedSet
    held_out: EncodedSet
    facts: dict[str, Any]


def prepare_growth(options: GrowthOptions) -> Ingredients:
    """Make the data and the base model."""
    records = load_records(None, seed=options.seed)
    tokenizer = train_tokenizer(records.held_out, SMALL_CONFIG.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = build(SMALL_CONFIG, tokenizer)
    base_samples = encode(records.held_out, tokenizer, SMALL_CONFIG.train_length)
    train(model, base_samples, options.base_steps, options.seed, SMALL_CONFIG)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    architecture: Any = type(model)
    config: Any = model.config

    def make_model() -> nn.Module:
        fresh: nn.Module = architecture(config)
        fresh.load_state_dict(state)
        return fresh.train()

    chosen = records.records[: NUM_RECORDS + NUM_EVALUATED]
    samples = encode(chosen[:NUM_RECORDS], tokenizer, MAX_LENGTH)
    facts = {
        "model": f"{MODEL} (built-in base)",
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "data": records.name,
        "samples": len(samples),
        "tokens_per_sample": round(float(samples.lengths.mean()), 1),
        "samples_per_step": options.num_micro,
    }
    return Ingredients(
        make_model, samples, encode(chosen[NUM_RECORDS:], tokenizer, MAX_LENGTH), facts
    )


def draw_positions(num_samples: int, count: int, seed: int) -> Iterator[list[int]]:
    """Yield the positions of global batches forever, without repeats within an epoch."""
    rng = random.Random(seed)
    while True:
        order = list(range(num_samples))
        rng.shuffle(order)
        for start in range(0, num_samples - count + 1, count):
            yield order[start : start + count]


def make_optimizer(options: GrowthOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a training: the study's AdamW, or SGD without momentum."""
    rate = options.effective_learning_rate
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate)
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)


@dataclass(frozen=True, slots=True)
class StudiedReduction:
    """The way in which the workers' gradients become one.

    The ``num_workers`` divide the number of micro-batches M; each adds up M / W. With ``arrival``
    they are added in an order that is drawn anew for each bucket and step, as they would come in;
    else always from the first to the last. Buffer and partial sums have the ``dtype``. A
    ``loss_scale`` is a factor of the loss before backward, by which the gradient is divided again,
    so that small values survive a 16-bit buffer; None: no scale.
    """

    num_workers: int
    arrival: bool = False
    dtype: str = "float32"
    loss_scale: float | None = None


class Reducer:
    """Averages gradients in one way; keeps the loss's scale and the orders drawn by ``seed``.

    W gradients lie in the rows of one tensor. What a job would do over the network is done here,
    partial sum by partial sum, so that two trainings can differ in the reduction alone.
    ``num_skipped`` counts the steps whose scaled gradient overflowed; a scaler leaves them out.
    """

    def __init__(self, reduction: StudiedReduction, bucket_elements: int, seed: int) -> None:
        self.num_skipped = 0
        self._reduction = reduction
        self._arithmetic = Arithmetic(inputs=reduction.dtype, sums=reduction.dtype)
        self._bucket_elements = bucket_elements
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = reduction.loss_scale or 1.0

    def reduce(self, micro_gradients_MP: Tensor) -> Tensor | None:
        """Return the mean of the micro-batches' gradients, ``[P]`` in fp32.

        Every worker adds its own micro-batches in fp32, one after the other, divides by W as DDP
        does, and rounds to the buffer's type. The buffers are then added in that type. A scale of
        the loss is a power of two: it is applied to the gradient here, with the same bits. None
        when the scaled sum is not finite; the scale is then halved for the next step.
        """
        reduction = self._reduction
        local_WP = _local_means(micro_gradients_MP, reduction.num_workers) * self._scale
        total_P = reduce_buffers(
            to_buffers(local_WP.numpy(), self._arithmetic),
            Scheme.ARRIVAL if reduction.arrival else Scheme.SEQUENTIAL,
            self._arithmetic,
            self._draw_orders(local_WP.shape[1]) if reduction.arrival else None,
            bucket_elements=self._bucket_elements,
        )
        mean_P = torch.from_numpy(total_P) / self._scale
        if reduction.loss_scale and not bool(mean_P.isfinite().all()):
            self._scale /= 2
            self.num_skipped += 1
            return None
        return mean_P

    def _draw_orders(self, num_elements: int) -> NDArray[np.int64]:
        """Return the order of arrival in each bucket, ``[B, W]``."""
        workers = self._reduction.num_workers
        orders = [
            torch.randperm(workers, generator=self._generator).numpy()
            for _ in range(num_buckets(num_elements, self._bucket_elements))
        ]
        return np.stack(orders)


def _local_means(micro_gradients_MP: Tensor, num_workers: int) -> Tensor:
    """Return each worker's gradient ``[W, P]``, the mean over its own micro-batches."""
    num_micro, num_elements = micro_gradients_MP.shape
    parts_WAP = micro_gradients_MP.view(num_workers, num_micro // num_workers, num_elements)
    accumulation = parts_WAP.shape[1]
    local_WP: Tensor = parts_WAP[:, 0] / accumulation
    for micro in range(1, accumulation):
        local_WP = local_WP + parts_WAP[:, micro] / accumulation
    return local_WP


class _Training:
    """One training of an experiment; keeps its last reduced gradient and loss."""

    def __init__(self, options: GrowthOptions, ingredients: Ingredients, pair: str) -> None:
        self.model = ingredients.make_model()
        self.loss = 0.0
        self.gradient_P = torch.zeros(0)
        self.reducer = Reducer(_reduction(pair, options), BUCKET_ELEMENTS, options.seed)
        self._samples = ingredients.samples
        self._optimizer = make_optimizer(options, self.model)
        self._parameters = list(self.model.parameters())
        order_seed = options.seed + (pair == DATA)
        self._batches = draw_positions(len(self._samples), options.num_micro, order_seed)

    def step(self) -> None:
        positions = next(self._batches)
        losses = []
        gradients = []
        for position in positions:
            inputs, _ = self._samples.collate([position])
            loss = self.model(**inputs).loss
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                        for p in self._parameters
                    ]
                )
            )
            self._optimizer.zero_grad()
        self.loss = float(np.mean(losses))
        mean_P = self.reducer.reduce(torch.stack(gradients))
        if mean_P is None:
            return
        self.gradient_P = mean_P
        parts = torch.split(mean_P, [p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters_by_group(self) -> dict[str, Tensor]:
        """Return the parameters of each group in one vector, in the model's order."""
        groups: dict[str, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            groups.setdefault(block_of(name), []).append(parameter.detach().flatten())
        return {name: torch.cat(parts) for name, parts in groups.items()}


class _Comparison:
    """Fills one pair's series."""

    def __init__(self, pair: str, training: _Training) -> None:
        self.training = training
        self.result = PairResult(pair)
        self._layers: dict[str, dict[str, Any]] = {}

    def compare(self, first: _Training, groups: dict[str, Tensor], step: int) -> None:
        own = self.training.parameters_by_group()
        for name, values in groups.items():
            layer = self._layers.setdefault(name, {"group": name, "first_step": None})
            layer["distance"] = relative_distance(values, own[name])
            if layer["first_step"] is None and not torch.equal(values, own[name]):
                layer["first_step"] = step
        a = torch.cat(list(groups.values()))
        b = torch.cat(list(own.values()))
        ulps = ulp_distance(a.numpy(), b.numpy())
        result = self.result
        result.distance.append(relative_distance(a, b))
        result.gradient_distance.append(
            relative_distance(first.gradient_P, self.training.gradient_P)
        )
        differs = (a.view(torch.int32) != b.view(torch.int32)).numpy()
        result.max_ulp.append(float(ulps.max()))
        result.median_ulp.append(float(np.median(ulps[differs])) if differs.any() else 0.0)
        result.differing.append(float(differs.mean()))
        result.loss_difference.append(self.training.loss - first.loss)

    def finish(self) -> PairResult:
        return replace(
            self.result,
            layers=list(self._layers.values()),
            growth=fit_growth(self.result.distance),
            skipped=self.training.reducer.num_skipped,
        )


def run_growth(options: GrowthOptions, progress: Progress = no_progress) -> GrowthResult:
    """Train the pairs side by side, on one thread for equal bits, and compare after each step."""
    with one_thread():
        progress("base model", 0, 1)
        ingredients = prepare_growth(options)
        progress("base model", 1, 1)
        first = _Training(options, ingredients, CONTROL)
        comparisons = [
            _Comparison(pair, _Training(options, ingredients, pair)) for pair in options.pairs
        ]
        result = GrowthResult(options.to_json(), ingredients.facts, [], [], [])
        every = max(1, options.steps // options.evaluations)
        for step in range(1, options.steps + 1):
            first.step()
            result.loss.append(first.loss)
            groups = first.parameters_by_group()
            for comparison in comparisons:
                comparison.training.step()
                comparison.compare(first, groups, step)
            if step % every == 0 or step == options.steps:
                _evaluate(result, first, comparisons, ingredients.held_out, step)
            progress("trainings", step, options.steps)
        return replace(result, pairs=tuple(comparison.finish() for comparison in comparisons))


def _evaluate(
    result: GrowthResult,
    first: _Training,
    comparisons: list[_Comparison],
    held_out: EncodedSet,
    step: int,
) -> None:
    loss = mean_loss(first.model, held_out)
    result.evaluated.append(step)
    result.evaluation.append(loss)
    for comparison in comparisons:
        own = mean_loss(comparison.training.model, held_out)
        comparison.result.evaluation.append(own - loss)


def mean_loss(model: nn.Module, samples: EncodedSet) -> float:
    """Return the mean loss over all label tokens, in nats; logits to loss in float64."""
    order = np.argsort(samples.lengths, kind="stable").tolist()
    total = 0.0
    tokens = 0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(order), _EVALUATED_AT_ONCE):
            inputs, _ = samples.collate(order[start : start + _EVALUATED_AT_ONCE])
            targets = inputs.pop("labels")[:, 1:]
            logits = model(**inputs).logits[:, :-1].double()
            total += float(
                F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="sum")
            )
            tokens += int((targets != IGNORED).sum())
    model.train()
    return total / tokens


def relative_distance(a: Tensor, b: Tensor) -> float:
    """Return ``|a - b| / |a|`` in float64; 0 when both are equal, also when both are 0 or empty."""
    difference = float((a.double() - b.double()).norm())
    return difference / float(a.double().norm()) if difference else 0.0


def _reduction(pair: str, options: GrowthOptions) -> StudiedReduction:
    """Return how the second training of a pair reduces."""
    workers = options.workers
    return {
        CONTROL: StudiedReduction(workers),
        ORDER: StudiedReduction(workers, arrival=True),
        BFLOAT16: StudiedReduction(workers, dtype="bfloat16"),
        FLOAT16: StudiedReduction(workers, dtype="float16"),
        FLOAT16_SCALED: StudiedReduction(workers, dtype="float16", loss_scale=options.loss_scale),
        WORKERS: StudiedReduction(2 * workers),
        DATA: StudiedReduction(workers),
    }[pair]
