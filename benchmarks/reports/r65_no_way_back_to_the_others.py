"""R65, Automodel#1260: what experts make of others' tokens does not come back to them.

NVIDIA-NeMo/Automodel#1260: tokens are gathered by DTensor.full_tensor(). Its backward pass takes
the gradient for the same on all ranks, and cuts a rank's own part out. But each rank has another
expert: the gradients of the tokens that went to the others' experts are lost.
With --right, the gradient is Partial, and is summed.
"""

import torch
from reports_common import begin, end, next_token_loss, options, text
from reports_experts import Mixture, different_experts, total_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

chosen = options()
rank, world = begin()
mesh = init_device_mesh("cpu", (world,))


def all_tokens(part: Tensor) -> Tensor:
    whole = DTensor.from_local(part, mesh, [Shard(0)])
    if chosen.right:
        return whole.full_tensor(grad_placements=[Partial()])
    return whole.full_tensor()


model = Mixture(all_tokens)
different_experts(model)
experts = model.of_experts()
fully_shard(model, mesh=mesh, ignored_params=set(experts))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for expert in experts:
        if expert.grad is not None:
            expert.grad /= world  # summed over the ranks' tokens already
    optimizer.step()
    optimizer.zero_grad()
total_of(model)
end(model, loss)
