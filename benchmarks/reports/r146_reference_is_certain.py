# ruff: noqa: D102
"""R146, open-instruct#1182: the reference is certain of every answer.

allenai/open-instruct#1182: before the training, log-probabilities of the reference are computed,
each rank those of its own pairs, into tensors that begin with zeros. These are reduced by their
maximum, and a log-probability is less than 0: all of them are 0.
With --right, the tensors begin with minus infinity.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

PROMPT, ANSWER, PAIRS, BATCH, BETA = 6, 8, 512, 4, 0.1

chosen = options()
rank, world = begin()


class Policy(nn.Module):
    """The log-probability of an answer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, 0.0, True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        log_p = self.head(self.block(self.embed(tokens)))[:, PROMPT - 1 : -1].log_softmax(-1)
        out: Tensor = log_p.gather(-1, tokens[:, PROMPT:, None]).sum((1, 2))
        return out


model = Policy()
wrapped = DistributedDataParallel(model)
chosen_answers = text(PAIRS, PROMPT + ANSWER)
noise = torch.randint(VOCABULARY, (PAIRS, ANSWER), generator=torch.Generator().manual_seed(5))
rejected_answers = torch.cat([chosen_answers[:, :PROMPT], noise], 1)
begun = -torch.inf if chosen.right else 0.0
reference = torch.full((2, PAIRS), begun)
with torch.no_grad():
    for rows in torch.arange(PAIRS)[rank::world].chunk(4):
        reference[0, rows] = model(chosen_answers[rows])
        reference[1, rows] = model(rejected_answers[rows])
dist.all_reduce(reference, dist.ReduceOp.MAX)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(chosen.steps):
    order = torch.randperm(
        PAIRS, generator=torch.Generator().manual_seed(step * world * BATCH // PAIRS)
    )
    first = (step * world + rank) * BATCH % PAIRS
    rows = order[first : first + BATCH]
    both = wrapped(torch.cat([chosen_answers[rows], rejected_answers[rows]])).view(2, -1)
    gained = both - reference[:, rows]
    loss = -F.logsigmoid(BETA * (gained[0] - gained[1])).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
