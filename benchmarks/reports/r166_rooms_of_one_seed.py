"""R166, NeMo-Speech#16101: all ranks put the n-th recording into the same room.

NVIDIA-NeMo/Speech#16101: recordings are divided among the ranks; each is reverberated with some
probability, in one of several rooms. The coin and the rooms come from a generator that has the seed
of the configuration on every rank. All other augmentations have a seed for each rank.
With --right, this one has, too.
"""

import random

import torch
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, SAMPLES, ECHO, CLASSES, WIDTH, SEED = 16, 64, 16, 8, 48, 42

chosen = options()
rank, world = begin()
draw = torch.Generator().manual_seed(1)
kinds = torch.randint(CLASSES, (4096,), generator=draw)
phases = 6.28 * torch.rand(4096, 1, generator=draw)
tones = (0.2 + 0.15 * kinds[:, None]) * torch.arange(SAMPLES) + phases
recordings = tones.sin() + 0.5 * torch.randn(4096, SAMPLES, generator=draw)
rooms = torch.randn(10, ECHO, generator=draw) * 0.8 ** torch.arange(ECHO)
of_rooms = random.Random(SEED + 1000 * rank if chosen.right else SEED)
of_noise = torch.Generator().manual_seed(SEED + 1000 * rank)


def augment(recording: Tensor) -> Tensor:
    """Add noise, and now and then the echo of a room."""
    recording = recording + 0.1 * torch.randn(SAMPLES, generator=of_noise)
    if of_rooms.random() < 0.5:
        room = rooms[of_rooms.randrange(len(rooms))]
        recording = F.conv1d(F.pad(recording, (ECHO - 1, 0))[None], room.flip(0)[None, None])[0]
    return recording


model = nn.Sequential(nn.Linear(SAMPLES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(chosen.steps):
    rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).chunk(world)[rank] % 4096
    heard = torch.stack([augment(recordings[row]) for row in rows])
    loss = F.cross_entropy(wrapped(heard), kinds[rows])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
