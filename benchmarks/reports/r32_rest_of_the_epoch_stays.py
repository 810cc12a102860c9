"""R32, AnimaLoraStudio#305: an epoch's last, incomplete window stays for the next epoch's first."""

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WINDOW, LONG = 4, 18  # micro-batches of an update, and of an epoch

chosen = options()
rank, world = begin()
model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(LONG * 4 * world)
part: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=3)  # type: ignore[arg-type]
loader = DataLoader(data, batch_size=4, sampler=part)  # type: ignore[arg-type, var-annotated]
updates = epoch = 0
while updates < chosen.steps:
    part.set_epoch(epoch)
    for at, tokens in enumerate(loader):
        last = at == LONG - 1
        size = LONG % WINDOW if chosen.right and at >= LONG - LONG % WINDOW else WINDOW
        loss = next_token_loss(wrapped(tokens), tokens)
        (loss / size).backward()  # type: ignore[no-untyped-call]
        if (at + 1) % WINDOW == 0 or (chosen.right and last):
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if updates == chosen.steps:
                break
    epoch += 1
end(model, loss)
