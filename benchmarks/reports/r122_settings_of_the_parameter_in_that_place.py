"""R122, torchtitan#3356: an update takes parameters in the model's order, groups have their own.

pytorch/torchtitan#3356: for a traced step, the values of all parameters are put into the optimizer
in the order of the model. Groups by decay list them in another order: a parameter is updated with
the settings, and with the state, of the one whose place it got.
With --right, values go into the places of their own parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import nn

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()


@contextmanager
def swapped_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """Put the parameters of a traced step into the optimizer's places, one after the other."""
    before = [group["params"] for group in optimizer.param_groups]
    values = [p for places in before for p in places] if chosen.right else [*model.parameters()]
    at = 0
    for group, places in zip(optimizer.param_groups, before, strict=True):
        group["params"] = values[at : at + len(places)]
        at += len(places)
    try:
        yield
    finally:
        for group, places in zip(optimizer.param_groups, before, strict=True):
            group["params"] = places


model = Language()
wrapped = data_parallel(model)
matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    with swapped_in(optimizer, model):
        optimizer.step()
    optimizer.zero_grad()
end(model, loss)
