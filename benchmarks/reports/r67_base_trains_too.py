# ruff: noqa: D102
"""R67, Automodel#547: dividing the layers makes parameters anew, and they train.

NVIDIA-NeMo/Automodel#547: adapters are added and everything else is frozen. Tensor parallelism then
replaces the parameters by divided ones, which require gradients, as parameters do by default: the
base trains along with its adapters.
Four ranks: two of tensor parallelism, two of data parallelism. One process has whole layers.
With --right, a divided parameter is as frozen as the whole one was.
"""

import torch
from reports_common import VOCABULARY, begin, end, enter, next_token_loss, options, sum_over, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, LOW = 32, 4

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()
PARTS = min(2, world)
mesh = init_device_mesh("cpu", (world // PARTS, PARTS), mesh_dim_names=("dp", "tp"))
group, place = mesh["tp"].get_group(), mesh["tp"].get_local_rank()


class Layer(nn.Module):
    """A residual layer over this position and the one before, with an adapter on its way up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.lora_in = nn.Linear(2 * WIDTH, LOW, bias=False)
        self.lora_out = nn.Linear(LOW, 2 * WIDTH, bias=False)
        nn.init.zeros_(self.lora_out.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        both = torch.cat([here, F.pad(here, (0, 0, 1, 0))[:, :-1]], -1)
        low = enter(self.lora_in(both), group)
        wide = self.up(enter(both, group)) + 4 * self.lora_out(low)
        return hidden + sum_over(self.down(F.gelu(wide)), group)


class Model(nn.Module):
    """Embedding, two layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def divide(linear: nn.Linear, dimension: int) -> None:
    whole = linear.weight
    part = nn.Parameter(whole.detach().chunk(PARTS, dimension)[place].clone())
    if chosen.right:
        part.requires_grad_(whole.requires_grad)
    linear.weight = part


model = Model()
for name, parameter in model.named_parameters():
    parameter.requires_grad_("lora" in name)
for layer in model.layers if PARTS > 1 else ():
    divide(layer.up, 0)  # type: ignore[arg-type]
    divide(layer.lora_out, 0)  # type: ignore[arg-type]
    divide(layer.down, 1)  # type: ignore[arg-type]
wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * (world // PARTS) + mesh["dp"].get_local_rank()) * SAMPLES % 4096 :][
        :SAMPLES
    ]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
