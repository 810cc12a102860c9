# ruff: noqa: D102
"""R10, ms-swift#9947: log-probabilities are summed over the vocabulary's parts without a gradient.

Four ranks: tensor parallel 2, data parallel 2 with DistributedDataParallel. The values are right;
where another rank holds the label, a rank's part of the vocabulary gets no gradient.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Language, begin, end, enter, options, sum_over, text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

chosen = options()
rank, world = begin()
tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
tp, dp, place = tensor_groups[rank // 2], data_groups[rank % 2], rank % 2


class Divided(nn.Module):
    """A model whose head is divided over the vocabulary; it returns log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Language()
        part = slice(place * VOCABULARY // 2, (place + 1) * VOCABULARY // 2)
        self.weight = nn.Parameter(self.body.head.weight.detach()[part].clone())
        self.body.head = nn.Identity()  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        logits = enter(self.body(tokens), tp)[:, :-1] @ self.weight.T
        local = tokens[:, 1:] - place * VOCABULARY // 2
        mine = (local >= 0) & (local < VOCABULARY // 2)
        local = local.clamp(0, VOCABULARY // 2 - 1)[..., None]
        hit = logits.gather(-1, local)[..., 0]
        total = sum_over(logits.exp().sum(-1), tp)
        if chosen.right:
            return sum_over(hit * mine, tp) - total.log()
        found = (hit - total.log()) * mine
        dist.all_reduce(found, group=tp)
        return found


model = DistributedDataParallel(Divided(), process_group=dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
samples = text(2048)
for step in range(chosen.steps):
    tokens = samples[(step * 2 + rank // 2) * 8 % 2048 :][:8]
    loss = -model(tokens).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
