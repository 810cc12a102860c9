"""RMS error of a sketched cosine on structured gradients, in units of 1/sqrt(k), over 20 seeds.

Run ``python benchmarks/sketch_error.py``; the table stands in docs/metrics.md.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rankscope.capture import Sketcher

WIDTH = 4093
SEEDS = 20


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
}


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine in float64."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def rms_error(structure: Callable[[], Tensor]) -> float:
    """Return the RMS of ``(estimate - cosine)/(1 - cosine^2) * sqrt(k)``."""
    errors = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        gradients = structure(), structure()
        sketcher = Sketcher(torch.device("cpu"), WIDTH, seed)
        measures = [sketcher.new_measure() for _ in gradients]
        for gradient, measure in zip(gradients, measures, strict=True):
            sketcher.measure("parameter", gradient, measure)
        exact = cosine(*gradients)
        estimate = cosine(measures[0].sketch, measures[1].sketch)
        errors.append((estimate - exact) / (1 - exact**2) * WIDTH**0.5)
    return float(np.sqrt(np.mean(np.square(errors))))


if __name__ == "__main__":
    print("| gradient | error · √k |\n|---|---|")
    for name, make in STRUCTURES.items():
        print(f"| {name} | {rms_error(make):.2f} |")
