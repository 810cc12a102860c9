# ruff: noqa: D102
"""R171, Megatron-Bridge#5900: the features of an adapter belong to different places of the text.

NVIDIA-NeMo/Megatron-Bridge#5900: some layers are the same on all ranks of tensor parallelism, and
see the places of the rank alone, as the sequence is divided. Adapters of these are divided by
features nevertheless: each rank computes some of them, of its own places, and they are put together
over the ranks.
With --right, these adapters are whole on each rank.
Four ranks: two of data parallelism, each with two that have half of each sequence.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, gather, text
from reports_layouts import begin, end, options
from reports_sequences import PartAttention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

WIDTH, HEADS, RANK, LENGTH, GLOBAL_BATCH = 32, 4, 4, 24, 16

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS
group, part, data_rank = None, 0, 0
if world > 1:
    mesh = init_device_mesh("cpu", (DATA_PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    group, part = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    data_rank = mesh["dp"].get_local_rank()
divided = group is not None and not chosen.right


class Adapted(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        lora_in, lora_out = torch.randn(RANK, WIDTH) / WIDTH**0.5, torch.zeros(WIDTH, RANK)
        if divided:
            lora_in, lora_out = lora_in.chunk(PARTS)[part], lora_out.chunk(PARTS)[part]
        self.lora_in, self.lora_out = nn.Parameter(lora_in.clone()), nn.Parameter(lora_out.clone())
        for parameter in (self.lora_in, self.lora_out):
            parameter.tensor_model_parallel = divided  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        low = F.linear(hidden, self.lora_in)
        low = gather(low, -1, group) if divided else low
        change = F.linear(low, self.lora_out)
        change = gather(change, -1, group) if divided else change
        out: Tensor = self.layer(hidden) + 4 * change
        return out


class Model(nn.Module):
    """Embeddings, two layers of attention and adapted layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(PartAttention(WIDTH, HEADS, group) for _ in range(2))
        self.adapted = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(places)
        mask = places[:, None] >= torch.arange(LENGTH)
        for attention, adapted in zip(self.attention, self.adapted, strict=True):
            hidden = hidden + torch.tanh(adapted(attention(hidden, mask)))
        logits: Tensor = self.head(hidden)
        return logits


model = Model()
for name, parameter in model.named_parameters():
    parameter.requires_grad_("lora" in name)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
data = text(4096, LENGTH + 1)
places = torch.arange(LENGTH).chunk(PARTS)[part]
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH].chunk(DATA_PARTS)[data_rank]
    tokens, labels = batch[:, :-1][:, places], batch[:, 1:][:, places]
    loss = F.cross_entropy(model(tokens, places).flatten(0, 1), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in trained if world > 1 else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group() if divided else None)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
