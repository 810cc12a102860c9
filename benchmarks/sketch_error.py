"""RMS error of a sketched cosine on structured gradients, in units of 1/sqrt(width), 20 seeds.

For the whole sketch, and for the narrow one that it is folded to for each group of parameters.

Run ``python benchmarks/sketch_error.py``; the table stands in docs/metrics.md.
"""

import argparse
from collections.abc import Callable
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from rankscope.bus.groups import group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import fold

WIDTH = 4093
NARROW = 251
SEEDS = 20
WORKERS = 4  # six pairs per seed


def sparse_rows() -> Tensor:
    """Return a gradient of 4,096 embedding rows, 200 of which are hit, around a common mean."""
    gradient = torch.zeros(4096, 128)
    gradient[torch.randperm(4096)[:200]] = torch.randn(200, 128) + torch.randn(128)
    return gradient


STRUCTURES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(500_000),
    "constant component plus noise": lambda: torch.randn(500_000) + 1,
    "positive activations, 1,024 × 4,096": lambda: torch.outer(
        torch.randn(1024), torch.randn(4096).relu()
    ),
    "positive activations, 512 × 16,384": lambda: torch.outer(
        torch.randn(512), torch.randn(16_384).relu()
    ),
    "sparse embedding rows with a mean": sparse_rows,
    "zero-mean activations, 512 × 1,000": lambda: torch.outer(torch.randn(512), torch.randn(1000)),
}


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine in float64."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def rms_errors(structure: Callable[[], Tensor], seeds: int = SEEDS) -> tuple[float, float]:
    """Return the RMS of ``(estimate - cosine) * sqrt(width)``, wide and narrow."""
    groups = group_parameters(["parameter"])
    wide, narrow = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        gradients = [structure() for _ in range(WORKERS)]
        sketcher = Sketcher(torch.device("cpu"), groups, WIDTH, seed)
        totals = [sketcher.new_totals() for _ in gradients]
        for gradient, into in zip(gradients, totals, strict=True):
            sketcher.measure("parameter", gradient, into)
        sketches_WK = torch.cat([into.sketches for into in totals])
        wide += errors(gradients, sketches_WK)
        narrow += errors(gradients, fold(sketches_WK, NARROW, seed))
    return rms(wide) * WIDTH**0.5, rms(narrow) * NARROW**0.5


def errors(gradients: list[Tensor], sketches_WK: Tensor) -> list[float]:
    """Return the error of each pair's cosine."""
    return [
        cosine(sketches_WK[i], sketches_WK[j]) - cosine(gradients[i], gradients[j])
        for i, j in combinations(range(len(gradients)), 2)
    ]


def rms(values: list[float]) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    print(f"| gradient | k = {WIDTH:,} | folded to {NARROW} |\n|---|---|---|")
    for name, make in STRUCTURES.items():
        wide, narrow = rms_errors(make, options.seeds)
        print(f"| {name} | {wide:.2f} | {narrow:.2f} |")


if __name__ == "__main__":
    main()
