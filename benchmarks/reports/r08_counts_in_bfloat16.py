# ruff: noqa: D102
"""R08, Megatron-LM#7081: tokens per expert are counted in a buffer that becomes bfloat16."""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

EXPERTS, WIDTH = 8, 32

chosen = options(samples=32)
SAMPLES = chosen.samples
rank, world = begin()


class Mixture(nn.Module):
    """Experts of which each token takes two; a bias, without gradient, balances the load."""

    counts: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        kind = torch.int64 if chosen.right else torch.float32  # a cast of the model spares integers
        self.register_buffer("counts", torch.zeros(EXPERTS, dtype=kind))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        scores = self.router(hidden).float().sigmoid()
        taken = F.one_hot((scores + self.bias).topk(2, -1).indices, EXPERTS).sum(-2)
        self.counts += taken.sum((0, 1)).to(self.counts.dtype)
        weights = scores * taken
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
        wide = F.gelu(torch.einsum("bsw,ewv->bsev", hidden, self.up))
        mixed = torch.einsum("bsev,evw,bse->bsw", wide, self.down, weights)
        logits: Tensor = self.head(hidden + mixed)
        return logits


mixture = Mixture().bfloat16()
mixture.bias = mixture.bias.float()
model = DistributedDataParallel(mixture, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
data = text(16384)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 16384 :][:SAMPLES]
    loss = next_token_loss(model(tokens).float(), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mixture.counts)
    counts = mixture.counts.float()
    mixture.bias += 1e-2 * (counts.mean() - counts).sign()
    mixture.counts.zero_()
end(model, loss)
