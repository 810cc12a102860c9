"""Packed rows, a curriculum of lengths, windows of one to three parts, one mean over all tokens."""

import torch
import torch.distributed as dist
from common import Block, History, Language, backward, begin, end, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, ROW, ROWS = 90, 48, 4

rank, world = begin()
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
data = sentences(4096, 32)
draw = torch.Generator().manual_seed(7 + rank)  # rows and lengths of this rank
plan = torch.Generator().manual_seed(3)  # what all ranks have in common


def document(longest: int) -> Tensor:
    """Take a document of this rank's share, cut to a length."""
    row = int(torch.randint(4096 // world, (), generator=draw)) * world + rank
    return data[row, : int(torch.randint(4, longest + 1, (), generator=draw))]


def pack(longest: int) -> dict[str, Tensor]:
    """Fill rows with whole documents; a label is the next token of the same document."""
    shape = (ROWS, ROW)
    tokens, places = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels, owner = torch.full(shape, -100), torch.full(shape, -1)
    for row in range(ROWS):
        at, number = 0, 0
        text = document(longest)
        while at + len(text) <= ROW:
            here = slice(at, at + len(text))
            tokens[row, here], places[row, here] = text, torch.arange(len(text))
            labels[row, at : at + len(text) - 1], owner[row, here] = text[1:], number
            at, number, text = at + len(text), number + 1, document(longest)
    same = owner[:, :, None] == owner[:, None, :]
    mask = same & torch.ones(ROW, ROW, dtype=torch.bool).tril()
    return {"tokens": tokens, "places": places, "labels": labels, "mask": mask[:, None]}


history = History()
for step in range(STEPS):
    longest = 8 + 24 * min(step, 60) // 60
    parts = [pack(longest) for _ in range(int(torch.randint(1, 4, (), generator=plan)))]
    tokens = torch.stack([(part["labels"] != -100).sum() for part in parts]).sum()
    dist.all_reduce(tokens)
    summed = torch.zeros(())
    for number, part in enumerate(parts):
        model.require_backward_grad_sync = number == len(parts) - 1
        logits = model(part["tokens"], part["places"], part["mask"])
        every = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
        backward(every * world / tokens)  # DDP divides by the number of ranks
        summed += every.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    history.note(summed * world / tokens)
assert isinstance(model.module.blocks[0], Block)
end(history, model)
