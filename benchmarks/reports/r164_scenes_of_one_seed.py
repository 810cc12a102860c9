"""R164, nvSubquadratic#140: scenes are made up while training, and all ranks make up the same ones.

NVIDIA-BioNeMo/nvSubquadratic#140: a data set without an end draws each scene anew in the processes
of its loader. A function of its own seeds these from the loader's generator, in place of the one
that knows the rank; the generator has the configured seed on all ranks.
With --right, the rank is added to the seed.
"""

from collections.abc import Iterator

import torch
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES, TIMES, WIDTH, SEED = 8, 16, 32, 42


class Motion(IterableDataset[tuple[Tensor, Tensor]]):
    """Points that turn around a centre: what was seen so far, and where they will be."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        assert info is not None
        draw = torch.Generator().manual_seed(info.seed)
        while True:
            start, speed, noise = torch.randn(3, generator=draw)
            angles = 6.28 * start + (0.3 + 0.1 * speed) * torch.arange(TIMES + 1)
            seen = torch.stack([angles.cos(), angles.sin()], -1) + 0.01 * noise
            yield seen[:-1].flatten(), seen[-1]


def main() -> None:
    """Train."""
    chosen = options()
    rank, _ = begin()
    generator = torch.Generator().manual_seed(SEED + (rank if chosen.right else 0))
    loader = DataLoader(Motion(), batch_size=SAMPLES, num_workers=1, generator=generator)
    model = nn.Sequential(nn.Linear(2 * TIMES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    wrapped = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _, (seen, wanted) in zip(range(chosen.steps), loader, strict=False):
        loss = F.mse_loss(wrapped(seen), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    end(model, loss)


main()
