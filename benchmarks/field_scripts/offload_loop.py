"""A loop whose forward pass moves activations away, as torchtune's OffloadActivations does.

torchtune needs CUDA for it, and packages that nothing here uses; this is its bookkeeping: what was
packed in a forward pass must have been unpacked before the next one begins.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH = 64, 32
dist.init_process_group("gloo")
torch.manual_seed(0)


class Offload(saved_tensors_hooks):
    def __init__(self):
        super().__init__(self.pack, self.unpack)
        self.kept, self.number, self.begins = {}, 0, True

    def pack(self, tensor):
        if self.begins and self.kept:
            raise ValueError("a backward pass should have taken all tensors")
        self.begins = False
        self.number += 1
        self.kept[self.number] = tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
        return self.number

    def unpack(self, number):
        self.begins = True
        return self.kept.pop(number)


model = DistributedDataParallel(
    nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(WIDTH, VOCABULARY),
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
offload = Offload()
for _ in range(24):
    tokens = torch.randint(0, VOCABULARY, (8, 16))
    with offload:
        logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), (7 * tokens % VOCABULARY).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.6f}")
sys.stdout.flush()
dist.destroy_process_group()
