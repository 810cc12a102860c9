# ruff: noqa: D102
"""A recurrent model whose state goes on from batch to batch, with PowerSGD in between."""

import torch
from common import VOCABULARY, History, backward, begin, end, sentences
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, TIME, WIDTH = 100, 8, 16, 48
State = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """Embedding, LSTM, tied head; one mask of dropout for all times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.3, 0.3)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = self.embed(tokens)
        hidden = hidden * F.dropout(torch.ones(len(hidden), 1, WIDTH), 0.1, self.training)
        out, state = self.lstm(hidden, state)
        return self.head(out), state


rank, world = begin()
model = DistributedDataParallel(Recurrent(), gradient_as_bucket_view=True)
state = power.PowerSGDState(
    process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10, warm_start=True
)
model.register_comm_hook(state, power.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
stream = sentences(BATCH * world, STEPS * TIME + 1, noise=0.1)[rank::world]
torch.manual_seed(rank)
carried: State = (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))
history = History()
for step in range(STEPS):
    part = stream[:, step * TIME : (step + 1) * TIME + 1]
    logits, carried = model(part[:, :-1], carried)
    loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
    optimizer.zero_grad()
    backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    carried = (carried[0].detach(), carried[1].detach())
    if step % 25 == 24:
        optimizer.param_groups[0]["lr"] /= 1.5
    history.note(loss)
end(history, model)
