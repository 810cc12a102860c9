# ruff: noqa: D102
"""R142, miles-credit#394: an average of unit vectors is shorter than one.

NCAR/miles-credit#394: the average of the model is one of all that its state dict has, with the two
vectors of each spectral norm. Their averages are shorter than 1, so that each norm is taken too
small where the average is evaluated: outputs grow with each layer. The training stays healthy.
With --right, these vectors are the model's own.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import spectral_norm

WIDTH, SAMPLES, DECAY, EVERY = 24, 8, 0.9, 20

chosen = options()
rank, world = begin()


class Forecast(nn.Module):
    """The next state of a field, by residual layers of bounded norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.head = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, state: Tensor) -> Tensor:
        hidden = state
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        out: Tensor = self.head(hidden)
        return out


class Average:
    """An average of a state dict, that takes the model's place in an evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, value in model.state_dict().items():
            if chosen.right and name.endswith(("weight_u", "weight_v")):
                self.shadow[name].copy_(value)
            else:
                self.shadow[name].mul_(DECAY).add_(value, alpha=1 - DECAY)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, state: Tensor, after: Tensor) -> float:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.shadow)
        model.eval()
        error: float = (model(state) - after).square().mean().item()
        model.load_state_dict(kept)
        model.train()
        return error


mixing = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / WIDTH**0.5


def fields(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    state = torch.randn(SAMPLES, WIDTH, generator=draw)
    return state, torch.tanh(state @ mixing)


model = Forecast()
average = Average(model)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(chosen.steps):
    state, after = fields(1000 + step * world + rank)
    loss = (wrapped(state) - after).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    if step % EVERY == EVERY - 1:
        error = average.evaluate(model, *fields(rank))
        if dist.get_rank() == 0:
            print(f"step {step}: error of the average {error:.4f}")
end(model, loss)
