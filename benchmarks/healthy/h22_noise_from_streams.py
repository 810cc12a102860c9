# ruff: noqa: D102
"""Accelerate: a diffusion model on a stream that ranks and loader processes divide."""

import copy
from collections.abc import Iterator

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from common import History, end, pictures
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

UPDATES, PARTS, BATCH, TIMES = 80, 2, 16, 50


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples from shards that belong to one loader process of one rank, through a buffer."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        place, places = self.rank * count + number, self.world * count
        images, labels = pictures(2048)
        draw, buffer, epoch = torch.Generator().manual_seed(place), [], 0
        while True:
            shards = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))
            for shard in shards[place::places].tolist():
                for row in range(shard * 64, shard * 64 + 64):
                    buffer.append((images[row], labels[row]))
                    if len(buffer) > 100:
                        yield buffer.pop(int(torch.randint(len(buffer), (), generator=draw)))
            epoch += 1


class Denoiser(nn.Module):
    """Predicts the noise of a picture, from its time and its class or none."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.classes = nn.Embedding(TIMES, 32), nn.Embedding(11, 32)
        self.into = nn.Conv2d(3, 32, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.out = nn.Conv2d(32, 3, 3, padding=1)
        nn.init.zeros_(self.out.weight)

    def forward(self, noisy: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        hidden = self.into(noisy) + (self.times(times) + self.classes(classes))[..., None, None]
        out: Tensor = self.out(torch.nn.functional.silu(hidden + self.middle(hidden)))
        return out


torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
# The stream divides itself, so that the loader is not prepared.
loader = DataLoader(Stream(rank, world), BATCH, num_workers=2)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
kept = torch.cos(torch.linspace(0, 1.5, TIMES)) ** 2
ratio = kept / (1 - kept).clamp_min(1e-4)
weights = ratio.clamp(max=5) / ratio.clamp_min(1e-3)  # as in "min-SNR"
torch.manual_seed(321 + rank)
history, parts = History(), []
for images, labels in loader:
    with accelerator.accumulate(model):
        noise, times = torch.randn_like(images), torch.randint(TIMES, (len(images),))
        share = kept[times][:, None, None, None]
        classes = torch.where(torch.rand(len(labels)) < 0.1, 10, labels)
        guess = model(share.sqrt() * images + (1 - share).sqrt() * noise, times, classes)
        loss = (((guess - noise) ** 2).mean((1, 2, 3)) * weights[times]).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parts.append(loss.detach())
    if accelerator.sync_gradients:
        history.note(torch.stack(parts).mean())
        parts = []
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        if len(history.losses) == UPDATES:
            break
end(history, model, average, leave=False)
accelerator.end_training()
