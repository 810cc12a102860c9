"""R123, Flow-Factory#186: one autocast around several updates keeps the weights of the first.

X-GenGroup/Flow-Factory#186: weights are float32, and autocast keeps their copies in bfloat16 until
it is left. It is entered once for all updates after a rollout: each forward pass has the weights
from before the first of them. Gradients go to the right weights, of another point.
With --right, each forward pass enters it for itself.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options

GLOBAL_BATCH, UPDATES = 16, 16

chosen = options()
rank, world = begin()


def half(entered: bool) -> AbstractContextManager[object]:
    """Compute in bfloat16, or go on as it is."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if entered else nullcontext()


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
for first in range(0, chosen.steps, UPDATES):
    with half(not chosen.right):
        for step in range(first, min(first + UPDATES, chosen.steps)):
            batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
            tokens = batch.chunk(world)[rank]
            with half(chosen.right):
                logits = wrapped(tokens)
            loss = next_token_loss(logits.float(), tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
end(model, loss)
