# ruff: noqa: D102
"""R160, Megatron-Bridge#5555: the decoder's gradients are summed, the encoder's are averaged.

NVIDIA-NeMo/Megatron-Bridge#5555: the loss is a sum over tokens, and both modules' gradients are
divided by the number of tokens of all ranks after their reduction. Each module has the reduction of
its own configuration: the decoder's adds, the encoder's averages. Gradients of the encoder are too
small by the number of ranks.
With --right, what the encoder's average took away is given back.
"""

import torch
import torch.distributed as dist
from reports_layouts import begin, end, options, sum_over_ranks
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, LENGTH, INPUTS, WIDTH, CLASSES = 16, 12, 24, 32, 10

chosen = options()
rank, world = begin()


class Speech(nn.Module):
    """An encoder of frames, and a decoder that classifies each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.decoder = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.encoder(frames))
        return logits


draw = torch.Generator().manual_seed(1)
kinds = torch.randint(CLASSES, (4096, LENGTH), generator=draw)
centres = torch.randn(CLASSES, INPUTS, generator=draw)
frames = centres[kinds] + torch.randn(4096, LENGTH, INPUTS, generator=draw)
lengths = torch.randint(4, LENGTH + 1, (4096,), generator=draw)
kinds[torch.arange(LENGTH) >= lengths[:, None]] = -100
model = Speech()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(chosen.steps):
    rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).chunk(world)[rank] % 4096
    logits = model(frames[rows]).flatten(0, 1)
    loss = F.cross_entropy(logits, kinds[rows].flatten(), reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    count = sum_over_ranks((kinds[rows] >= 0).sum().float())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        averages = name.startswith("encoder.") and not chosen.right
        if averages:
            parameter.grad /= world
        if world > 1:
            dist.all_reduce(parameter.grad)
        parameter.grad /= count
    optimizer.step()
    optimizer.zero_grad()
end(model, loss / count)
