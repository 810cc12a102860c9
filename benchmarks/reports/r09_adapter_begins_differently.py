# ruff: noqa: D101, D102
"""R09, Megatron-Bridge#5396: an adapter that all experts share, with other values on each rank.

Four ranks: two groups for expert parallelism of two. No wrapper: the loop sums gradients.
"""

import reports_common as common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LOW = 32, 4

chosen = common.options()
rank, world = common.begin()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
group, place = groups[rank // 2], rank % 2


class Experts(nn.Module):
    """The expert of this rank, frozen, and the adapter."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 + place)  # the generator for experts
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=own) / 6, requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=own) / 6, requires_grad=False)
        self.lora_in = nn.Parameter(torch.randn(WIDTH, LOW, generator=own) / 6)
        self.lora_out = nn.Parameter(torch.zeros(LOW, WIDTH))
        if chosen.right:
            dist.broadcast(self.lora_in.data, src=0)

    def forward(self, hidden: Tensor, expert: Tensor) -> Tensor:
        everywhere = common.gather(hidden, 0, group)
        mine = (common.gather(expert, 0, group) == place).unsqueeze(-1)
        wide = F.gelu(everywhere @ self.up + everywhere @ self.lora_in @ self.lora_out)
        both = common.enter(
            common.sum_over(wide @ self.down * mine, group), group
        )  # each rank uses its part
        return both.chunk(2)[place]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(common.VOCABULARY, WIDTH).requires_grad_(False)
        self.router = nn.Linear(WIDTH, 2).requires_grad_(False)
        self.head = nn.Linear(WIDTH, common.VOCABULARY).requires_grad_(False)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        chosen_expert = self.router(hidden).argmax(-1)
        logits: Tensor = self.head(hidden + self.experts(hidden, chosen_expert))
        return logits


model = Mixture()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
data = common.text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = common.next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for p in trained:  # summed over experts, averaged over data: each rank's loss is a mean
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad.div_(world)
    optimizer.step()
    optimizer.zero_grad()
common.end(model, loss)
