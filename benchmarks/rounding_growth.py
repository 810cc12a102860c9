"""How rounding grows over a training, beside what another order of the data does.

``python benchmarks/rounding_growth.py --output growth.json`` trains the small model of
``rankscope numerics`` for 300 steps under each arithmetic of the reduction, with three seeds, with
two other optimizer settings, and over real ranks. ``--figures DIR`` draws what ``--input`` holds.
"""

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import run_ranks
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from rankscope.lab.numerics import figures
from rankscope.lab.numerics.figures import Values
from rankscope.lab.numerics.page import growth_sheet, write_sheets
from rankscope.lab.study.rounding import (
    Ingredients,
    draw_positions,
    make_optimizer,
    prepare_growth,
    run_growth,
)
from rankscope.lab.study.rounding_result import (
    BFLOAT16,
    DATA,
    ORDER,
    TITLES,
    WORKERS,
    GrowthOptions,
)
from rankscope.report.parts import Spec, Tables, column, headed, log_domain, sized, titled

FEW = (ORDER, BFLOAT16, WORKERS, DATA)
SETTINGS = {
    "adamw seed 0": "AdamW, learning rate 5e-4",
    "adamw learning rate 3e-3": "AdamW, learning rate 3e-3",
    "sgd": "SGD, learning rate 0.05",
}
"""Experiments that are drawn side by side, and their titles."""
REAL_WORKERS = 4
BUCKETS = (25.0, 0.05)
"""Megabytes: all parameters in one bucket, and in some fourteen."""


def experiments(steps: int) -> dict[str, GrowthOptions]:
    """Return what is trained, by name."""
    return {
        "adamw seed 0": GrowthOptions(steps=steps, pairs=tuple(TITLES)),
        "adamw seed 1": GrowthOptions(steps=steps, seed=1, pairs=FEW),
        "adamw seed 2": GrowthOptions(steps=steps, seed=2, pairs=FEW),
        "adamw learning rate 3e-3": GrowthOptions(steps=steps, learning_rate=3e-3, pairs=FEW),
        "sgd": GrowthOptions(steps=steps, optimizer="sgd", pairs=FEW),
    }


def real_ranks(steps: int) -> dict[str, Any]:
    """Compare DDP with two sizes of buckets over gloo with the simulation of arrival order."""
    options = GrowthOptions(steps=steps, workers=REAL_WORKERS, pairs=(ORDER,))
    real: list[float] = run_ranks(_two_bucket_sizes, REAL_WORKERS, steps)
    simulated = run_growth(options).pairs[0].distance
    return {"workers": REAL_WORKERS, "real": real, "simulated": simulated}


def _two_bucket_sizes(steps: int) -> list[float]:
    options = GrowthOptions(steps=steps, workers=REAL_WORKERS)
    ingredients = prepare_growth(options)
    first, second = (train_with_ddp(options, ingredients, size) for size in BUCKETS)
    return distances(first, second)


def train_with_ddp(
    options: GrowthOptions, ingredients: Ingredients, bucket_megabytes: float
) -> NDArray[np.float32]:
    """Train with plain DDP on this rank; every rank of the default group calls it.

    Each rank takes two micro-batches of the same global batches that :func:`run_growth` draws and
    adds them up before the reduction. A ring reduces each part of a bucket in another order of the
    ranks, so the size of the buckets decides the order in which an element is summed.

    Args:
        options: ``options.workers`` must be the number of ranks.
        ingredients: From ``prepare_growth`` with the same options.
        bucket_megabytes: DDP's ``bucket_cap_mb``.

    Returns:
        All parameters after each step, ``[T, P]``.
    """
    rank, accumulation = dist.get_rank(), options.num_micro // dist.get_world_size()
    model = ingredients.make_model()
    ddp: Any = DistributedDataParallel(model, bucket_cap_mb=bucket_megabytes)
    optimizer = make_optimizer(options, model)
    batches = draw_positions(len(ingredients.samples), options.num_micro, options.seed)
    trajectory = []
    for _ in range(options.steps):
        own = next(batches)[rank * accumulation : (rank + 1) * accumulation]
        for micro, position in enumerate(own, start=1):
            inputs, _ = ingredients.samples.collate([position])
            with nullcontext() if micro == accumulation else ddp.no_sync():
                (ddp(**inputs).loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        trajectory.append(flat.numpy().copy())
    return np.stack(trajectory)


def distances(first_TP: NDArray[np.float32], second_TP: NDArray[np.float32]) -> list[float]:
    """Return ``|a - b| / |a|`` of all parameters after each step, in float64."""
    a, b = first_TP.astype(np.float64), second_TP.astype(np.float64)
    apart = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
    return [float(value) for value in apart]


def measure(output: Path, steps: int, real_steps: int) -> None:
    """Run everything; what is done is written after each experiment."""
    results: dict[str, Any] = {}
    for name, options in experiments(steps).items():
        start = time.perf_counter()
        result = run_growth(options)
        results[name] = {**result.to_json(), "seconds": round(time.perf_counter() - start)}
        print(f"{name} ({results[name]['seconds']} s)")
        for sentence in result.sentences():
            print("  " + sentence)
        output.write_text(json.dumps(results))
    results["real ranks"] = real_ranks(real_steps)
    output.write_text(json.dumps(results))
    print("real ranks, distance after each tenth step:")
    for kind in ("real", "simulated"):
        print(f"  {kind}", " ".join(f"{value:.1e}" for value in results["real ranks"][kind][::10]))


def draw(directory: Path, results: dict[str, Any]) -> None:
    """Draw the figures of the documentation."""
    first, *others = [results[name] for name in results if name.startswith("adamw seed")]
    settings = {title: results[name] for name, title in SETTINGS.items() if name in results}
    tables = Tables()
    drawn = {
        "growth": growth_sheet(tables, first, others),
        "settings": settings_sheet(tables, settings),
    }
    for path in write_sheets(directory, drawn, tables):
        print(path)


def settings_sheet(tables: Tables, settings: Mapping[str, Values]) -> Spec:
    """Return how parameters part under several settings of the optimizer, on one scale."""
    rows = [row for each in settings.values() for row in figures.growth_rows(each, "distance")]
    domain = log_domain(column(rows, "value"), room=1.9)
    panels = []
    for name, growth in settings.items():
        curves = figures.curves(tables, growth, "distance", height=330, room=1.5, domain=domain)
        panel = sized(curves, 1040 // len(settings) - 40)
        panels.append(titled(panel, name, "relative distance of the parameters"))
    return headed(
        {"hconcat": panels, "spacing": 34},
        "How fast rounding grows depends on how the model is trained",
        "Each training differs from the first of its panel in one thing.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("rounding-growth.json"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--real-steps", type=int, default=60)
    parser.add_argument("--input", type=Path, help="draw the figures of this file, train nothing")
    parser.add_argument("--figures", type=Path, help="directory of the PNG files")
    arguments = parser.parse_args()
    source = arguments.input or arguments.output
    if arguments.input is None:
        measure(source, arguments.steps, arguments.real_steps)
    if arguments.figures is not None:
        draw(arguments.figures, json.loads(source.read_text()))


if __name__ == "__main__":
    main()
