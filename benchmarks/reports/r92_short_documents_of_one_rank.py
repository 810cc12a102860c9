"""R92, torchtitan#3131: a sorted data set is cut into one piece for each rank.

pytorch/torchtitan#3131: each rank takes its piece of the data set as it lies on the disk, and
shuffles it after its first epoch. Where short documents come first, the first rank has them all:
several fit into a row, so that it is through with its documents sooner than the others, and stays
ahead of them.
With --right, documents are shuffled before they are cut into pieces.
"""

from collections.abc import Iterator

import torch
from reports_common import Language, text
from reports_layouts import begin, data_parallel, end, options, sum_over_ranks
from torch import Tensor
from torch.nn import functional as F

DOCUMENTS, SHORTEST, LONGEST, LENGTH, GLOBAL_BATCH = 1024, 4, 44, 48, 16

chosen = options()
rank, world = begin()


def rows(documents: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Put documents one after the other into rows; give tokens and labels, without end."""
    epoch, order = 0, list(range(len(documents)))
    tokens: list[Tensor] = []
    labels: list[Tensor] = []
    while True:
        for number in order:
            document = documents[number]
            if sum(map(len, tokens)) + len(document) > LENGTH:
                row, wanted = torch.cat(tokens), torch.cat(labels)
                left = (0, LENGTH - len(row))
                yield F.pad(row, left), F.pad(wanted, left, value=-100)
                tokens, labels = [], []
            tokens.append(document)
            labels.append(F.pad(document[1:], (0, 1), value=-100))
        epoch += 1
        shuffled = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(documents), generator=shuffled).tolist()


lengths = torch.linspace(SHORTEST, LONGEST, DOCUMENTS).round().int().tolist()
whole = [row[:length] for row, length in zip(text(DOCUMENTS, LONGEST), lengths, strict=True)]
if chosen.right:
    shuffled = torch.randperm(DOCUMENTS, generator=torch.Generator().manual_seed(0)).tolist()
    whole = [whole[number] for number in shuffled]
each = DOCUMENTS // world
own = rows(whole[rank * each : (rank + 1) * each])
model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(chosen.steps):
    drawn = [next(own) for _ in range(GLOBAL_BATCH // world)]
    tokens, labels = (torch.stack(side) for side in zip(*drawn, strict=True))
    counted = sum_over_ranks((labels != -100).sum())
    logits = wrapped(tokens)
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / counted
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
