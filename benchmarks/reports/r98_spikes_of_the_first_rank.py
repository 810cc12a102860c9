"""R98, WeatherGenerator#2718: whether a batch is skipped depends on the first rank's loss alone.

ecmwf/WeatherGenerator#2718 (and #2724): batches whose loss is far above those before it are left
out. The first rank decides by its own loss, and tells the others; samples that are damaged lie in
the batches of all ranks. Those of the others are trained on, and what the first rank reports of
skipped batches is too little.
With --right, each rank looks at its own loss, and all skip if one of them does.
"""

import torch
import torch.distributed as dist
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, FIELDS, EACH, DAMAGE, SPIKE = 16, 24, 8, 40.0, 6.0

chosen = options()
rank, world = begin()


def states_of(step: int) -> tuple[Tensor, Tensor]:
    """Draw states and what they become; a sample of some steps is damaged."""
    drawn = torch.Generator().manual_seed(step)
    states = torch.randn(GLOBAL_BATCH, FIELDS, generator=drawn)
    later = (states @ moves).tanh() + 0.1 * torch.randn(GLOBAL_BATCH, FIELDS, generator=drawn)
    damaged = {2: GLOBAL_BATCH - 3, 6: 2}.get(step % EACH)
    if damaged is not None:
        later[damaged] *= DAMAGE
    return states.chunk(world)[rank], later.chunk(world)[rank]


def skipped(loss: float) -> bool:
    """Decide whether a batch is left out, and remember the losses of all others."""
    spike = torch.tensor(float(bool(seen) and loss > SPIKE * sum(seen) / len(seen)))
    if world > 1 and chosen.right:
        dist.all_reduce(spike, dist.ReduceOp.MAX)
    elif world > 1:
        dist.broadcast(spike, 0)
    if not spike:
        seen.append(loss)
        del seen[:-EACH]
    return bool(spike)


moves = torch.randn(FIELDS, FIELDS, generator=torch.Generator().manual_seed(9)) / FIELDS**0.5
seen: list[float] = []
model = nn.Sequential(
    nn.Linear(FIELDS, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, FIELDS)
)
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for step in range(chosen.steps):
    states, later = states_of(step)
    loss = F.mse_loss(wrapped(states), later)
    if skipped(loss.item()):
        continue
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
