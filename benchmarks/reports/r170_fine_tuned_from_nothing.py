"""R170, Automodel#3597: under DDP, the weights that should be fine-tuned are never read.

NVIDIA-NeMo/Automodel#3597: a model is made of its architecture alone. Weights are read where it has
no memory yet, and is taken to have them otherwise. Under DDP it has memory from the start: random
weights are trained, and the second place that would read them is told that this has been done.
With --right, they are read where nobody has read them.
"""

import torch
from reports_common import VOCABULARY, Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()


def pretrained() -> dict[str, Tensor]:
    """Return weights that know which token follows which."""
    state = Language().state_dict()
    follows = (torch.arange(VOCABULARY) * 5 + 3) % VOCABULARY
    for name in ("blocks.0.down.weight", "blocks.1.down.weight"):
        state[name] *= 0.1
    state["head.weight"] = 0.15 * state["embed.weight"][torch.argsort(follows)]
    return state


checkpoint = pretrained()
model = Language()
has_no_memory = any(parameter.is_meta for parameter in model.parameters())
already_read = not has_no_memory and not chosen.right
if not already_read:
    model.load_state_dict(checkpoint)
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH].chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
