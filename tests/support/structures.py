"""Gradients whose structure lets weak signs through, and real ones."""

from collections.abc import Callable

import torch
from torch import Tensor


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(60_000, generator=generator)


def constant_plus_noise(generator: torch.Generator) -> Tensor:
    return normal(generator) + 1


def positive_activations(generator: torch.Generator) -> Tensor:
    delta, hidden = torch.randn(256, generator=generator), torch.randn(1024, generator=generator)
    return torch.outer(delta, hidden.relu())


def wide_positive_activations(generator: torch.Generator) -> Tensor:
    delta, hidden = torch.randn(64, generator=generator), torch.randn(4096, generator=generator)
    return torch.outer(delta, hidden.relu())


def sparse_rows_with_mean(generator: torch.Generator) -> Tensor:
    gradient = torch.zeros(2048, 64)
    rows = torch.randperm(2048, generator=generator)[:150]
    mean = torch.randn(64, generator=generator)
    gradient[rows] = torch.randn(150, 64, generator=generator) + mean
    return gradient


def zero_mean_activations(generator: torch.Generator) -> Tensor:
    delta, hidden = torch.randn(128, generator=generator), torch.randn(1000, generator=generator)
    return torch.outer(delta, hidden)


STRUCTURES: tuple[Callable[[torch.Generator], Tensor], ...] = (
    normal,
    constant_plus_noise,
    positive_activations,
    wide_positive_activations,
    sparse_rows_with_mean,
    zero_mean_activations,
)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))
