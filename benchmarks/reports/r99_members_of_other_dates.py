"""R99, anemoi-core#774: the members of an ensemble are forecasts of other dates.

ecmwf/anemoi-core#774: several members of an ensemble, on several ranks, forecast the same date; the
loss compares all of them with what came, and with each other. The data are dealt out to the ranks
as if each trained by itself: the members of the other rank are forecasts of other dates.
With --right, the ranks of an ensemble get the same dates.
"""

import torch
import torch.distributed as dist
from reports_common import gather
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn

DATES, FIELDS, NOISE, MEMBERS = 8, 24, 4, 4

chosen = options()
rank, world = begin()
each = MEMBERS // world


def dates_of(step: int) -> Tensor:
    """Give the dates of this rank's batch."""
    batch = step if chosen.right else step * world + rank
    return (batch * DATES + torch.arange(DATES)) % len(states)


def noise_of(step: int) -> Tensor:
    """Draw the noise of this rank's members, for each date."""
    drawn = torch.Generator().manual_seed(100_000 + step)
    return torch.randn(MEMBERS, DATES, NOISE, generator=drawn).chunk(world)[rank]


def score(members: Tensor, came: Tensor) -> Tensor:
    """Return the probability score: far from what came, less what the members are apart."""
    away = (members - came).abs().mean()
    apart = (members[:, None] - members[None]).abs().mean((2, 3)).sum()
    return away - apart / (2 * MEMBERS * (MEMBERS - 1))


drawn = torch.Generator().manual_seed(9)
moves = torch.randn(FIELDS, FIELDS, generator=drawn) / FIELDS**0.5
states = torch.randn(4096, FIELDS, generator=drawn)
later = (states @ moves).tanh() + 0.3 * torch.randn(4096, FIELDS, generator=drawn)
model = nn.Sequential(
    nn.Linear(FIELDS + NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, FIELDS)
)
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for step in range(chosen.steps):
    dates = dates_of(step)
    inputs = torch.cat([states[dates].expand(each, -1, -1), noise_of(step)], -1)
    members = wrapped(inputs.flatten(0, 1)).unflatten(0, (each, DATES))
    if world > 1:
        members = gather(members, 0, dist.group.WORLD)
    loss = score(members, later[dates])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
