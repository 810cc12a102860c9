# ruff: noqa: D102
"""An autoencoder whose codebook is a moving average over all ranks; dead codes are replaced."""

import torch
import torch.distributed as dist
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, CODES, WIDTH, DECAY = 100, 24, 12, 0.9


class Codebook(nn.Module):
    """The nearest of some vectors, which follow the mean of what was near them, on all ranks."""

    table: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(CODES, WIDTH)
        self.register_buffer("table", table)
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", table.clone())

    @torch.no_grad()
    def follow(self, encoded: Tensor, index: Tensor) -> None:
        near = F.one_hot(index, CODES).to(encoded.dtype)
        both = torch.cat([near.sum(0, keepdim=True).T, near.T @ encoded], dim=1)
        spare = encoded[torch.randint(len(encoded), (CODES,))]
        dist.all_reduce(both)
        dist.broadcast(spare, 0)
        self.counts.lerp_(both[:, 0], 1 - DECAY)
        self.sums.lerp_(both[:, 1:], 1 - DECAY)
        dead = self.counts < 0.3
        self.counts[dead] = 1.0
        self.sums[dead] = spare[dead]
        self.table.copy_(self.sums / self.counts[:, None])

    def forward(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.cdist(encoded.detach(), self.table).argmin(1)
        chosen = self.table[index]
        if self.training:
            self.follow(encoded.detach(), index)
        commitment = F.mse_loss(encoded, chosen)
        return encoded + (chosen - encoded).detach(), commitment


class Autoencoder(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(192, 48), nn.GELU(), nn.Linear(48, 2 * WIDTH))
        self.codes = Codebook()
        self.decoder = nn.Sequential(nn.Linear(2 * WIDTH, 48), nn.GELU(), nn.Linear(48, 192))

    def forward(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(flat).view(-1, WIDTH)
        quantised, commitment = self.codes(encoded)
        return self.decoder(quantised.view(len(flat), -1)), commitment


def main() -> None:
    rank, _ = begin()
    model = Autoencoder()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    data = TensorDataset(pictures(1600)[0].flatten(1))
    held_out = pictures(200, seed=2)[0].flatten(1)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=7)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    history = History()
    torch.manual_seed(100 + rank)
    for epoch in range(STEPS // len(loader)):
        sampler.set_epoch(epoch)
        for (flat,) in loader:
            rebuilt, commitment = parallel(flat)
            loss = F.mse_loss(rebuilt, flat) + 0.25 * commitment
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            history.note(loss)
        if rank == 0:  # the others wait
            model.eval()
            with torch.no_grad():
                rebuilt, _ = model(held_out)
            print(f"epoch {epoch}: held out {F.mse_loss(rebuilt, held_out):.4f}", flush=True)
            model.train()
        dist.barrier()
    end(history, model)


if __name__ == "__main__":
    main()
