"""R14, ultralytics#11217: each epoch begins with zero_grad(), and loses an unfinished window."""

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4

chosen = options()
rank, world = begin()
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = TensorDataset(text(160))  # 10 batches for each of two ranks, two and a half windows
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler)
batches = last = updates = epoch = 0
optimizer.zero_grad()
while updates < chosen.steps:
    sampler.set_epoch(epoch)
    if not chosen.right:
        optimizer.zero_grad()
    for (tokens,) in loader:
        loss = next_token_loss(model(tokens), tokens)
        (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
        batches += 1
        if batches - last >= ACCUMULATE:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            last = batches
            updates += 1
    epoch += 1
end(model, loss)
