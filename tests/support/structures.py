"""Gradients whose structure lets weak signs through, and real ones."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class SmallTransformer(nn.Module):
    """A causal language model of 0.2 M parameters."""

    def __init__(self, vocabulary: int = 512, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embedding(ids[:, :-1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


def language_model_gradients(seed: int, workers: int) -> list[dict[str, Tensor]]:
    """Return gradients by parameter name, of one model on each worker's own batch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SmallTransformer()
    frequencies = 1.0 / torch.arange(1, 513)  # as words have them
    gradients = []
    for _ in range(workers):
        ids = torch.multinomial(frequencies, 4 * 33, replacement=True, generator=generator)
        model.zero_grad()
        model(ids.view(4, 33)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return gradients


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))
