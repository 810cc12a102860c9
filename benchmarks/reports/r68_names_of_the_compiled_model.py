# ruff: noqa: D102
"""R68, senpai#2899: the average looks parameters up by names that compiling has changed.

wandb/senpai#2899: the averaged weights are kept by the names that parameters had before
torch.compile. Those of the compiled model begin with another word, so that none is found, and the
average stays the initial model, without an error.
With --right, that word is taken off.
The loss that is printed is that of the averaged weights.
"""

from typing import Any

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

chosen = options(compiled=1)
rank, world = begin()


class Average:
    """Weights that follow a model's slowly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            known = name.removeprefix("_orig_mod.") if chosen.right else name
            if known in self.weights:
                self.weights[known].lerp_(parameter, 1 - self.decay)


model = Language()
average = Average(model, 0.95)
compiled: Any = torch.compile(model, backend="aot_eager") if chosen.compiled else model
wrapped = DistributedDataParallel(compiled)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    average.update(compiled)
with torch.no_grad():
    held = text(64, seed=9)
    logits: Tensor = functional_call(model, average.weights, (held,))
    loss = next_token_loss(logits, held)
end(model, loss)
