"""How rounding grows over a training, beside what another order of the data does.

``python benchmarks/rounding_growth.py --output growth.json`` trains the small model of
``rankscope numerics`` for 300 steps under each arithmetic of the reduction, with three seeds, with
two other optimizer settings, and over real ranks. ``--figures DIR`` draws what ``--input`` holds.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from harness import run_ranks

from rankscope.study.rounding import GrowthOptions, prepare_growth, run_growth
from rankscope.study.rounding_ranks import distances, train_with_ddp
from rankscope.study.rounding_result import BFLOAT16, DATA, ORDER, TITLES, WORKERS
from rankscope.web.numerics_page import write_growth_figures

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
    for path in write_growth_figures(directory, first, others, settings):
        print(path)


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
