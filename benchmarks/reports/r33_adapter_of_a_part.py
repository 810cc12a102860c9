# ruff: noqa: D102
"""R33, mcore-bridge#173: an adapter's replicated factor learns from its rank's part of a text.

Four ranks: two of tensor and sequence parallelism, two of data parallelism.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, options, text
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, INNER, LOW = 32, 64, 4

chosen = options()
rank, world = begin()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
group, place = mesh["tp"].get_group(), mesh["tp"].get_local_rank()


def gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 1)


def scattered(whole: Tensor) -> Tensor:
    whole = whole.clone()
    dist.all_reduce(whole, group=group)
    return whole.chunk(2, 1)[place].contiguous()


class _Gather(Function):
    """Put the parts of a sequence together."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return gathered(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient)


class _Scatter(Function):
    """Sum over the ranks, and keep this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return scattered(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


def frozen(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5, requires_grad=False)


class Layer(nn.Module):
    """Two divided linear layers with adapters; outside, each rank has half of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(frozen(INNER, WIDTH).chunk(2, 0)[place].clone(), False)
        self.up_in = nn.Parameter(torch.randn(LOW, WIDTH) * 0.2)  # replicated
        self.up_out = nn.Parameter(torch.zeros(INNER // 2, LOW))
        self.down = nn.Parameter(frozen(WIDTH, INNER).chunk(2, 1)[place].clone(), False)
        self.down_in = nn.Parameter((torch.randn(LOW, INNER) * 0.2).chunk(2, 1)[place].clone())
        self.down_out = nn.Parameter(torch.zeros(WIDTH, LOW))  # replicated

    def forward(self, part: Tensor) -> Tensor:
        low = _Gather.apply(part @ self.up_in.T)  # type: ignore[no-untyped-call]
        wide = _Gather.apply(part) @ self.up.T + 2 * low @ self.up_out.T  # type: ignore[no-untyped-call]
        wide = F.gelu(wide)
        low = _Scatter.apply(wide @ self.down_in.T)  # type: ignore[no-untyped-call]
        out: Tensor = _Scatter.apply(wide @ self.down.T)  # type: ignore[no-untyped-call]
        both: Tensor = part + out + 2 * low @ self.down_out.T
        return both


class Adapted(nn.Module):
    """Frozen embedding and head, layers with adapters; gives the logits of this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = frozen(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens.chunk(2, 1)[place])
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = F.layer_norm(hidden, [WIDTH]) @ self.head.T
        return logits


model = Adapted()
wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
trained = [p for p in model.parameters() if p.requires_grad]
replicated = [p for layer in model.layers for p in (layer.up_in, layer.down_out)]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
data = text(2048, length=25)
for step in range(chosen.steps):
    tokens = data[(step * 2 + mesh["dp"].get_local_rank()) * 8 % 2048 :][:8]
    logits = wrapped(tokens[:, :-1])
    labels = tokens[:, 1:].chunk(2, 1)[place]
    part = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = part / tokens[:, 1:].numel()
    loss.backward()  # type: ignore[no-untyped-call]
    if chosen.right:
        for p in replicated:
            assert p.grad is not None
            dist.all_reduce(p.grad, group=group)
    optimizer.step()
    optimizer.zero_grad()
whole = loss.detach().clone()
dist.all_reduce(whole, group=group)
end(model, whole)
