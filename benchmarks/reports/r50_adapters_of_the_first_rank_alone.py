"""R50, axolotl#3977: only the first rank's shards of the adapters are ever updated.

axolotl-ai-cloud/axolotl#3772, repaired by #3977: to save memory, all ranks but the first build
model and adapters on the meta device. The optimizer is made before the sharding, and its parameters
are then exchanged for the sharded ones by their addresses. Those of meta tensors are all 0, so that
each place in the optimizer gets the same parameter. All rows of an adapter that other ranks hold
stay as they began.
With --right, what trains gets memory of its own before the optimizer is made.
"""

import torch
from reports_common import Adapted, Language, begin, end, next_token_loss, options, text
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

chosen = options(steps=120)
rank, world = begin()


def with_adapters() -> nn.Module:
    model = Language()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
    model.head = Adapted(model.head)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Adapted):
            module.layer.requires_grad_(False)
    return model


def materialise(model: nn.Module) -> None:
    """Give each parameter that trains zeros on the CPU; its values come with the sharding."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter, device="cpu")))


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Shard the model with the values of rank 0, and give the optimizer its new parameters."""
    values = model.state_dict() if rank == 0 else {}
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    places = [[names[p.data_ptr()] for p in g["params"]] for g in optimizer.param_groups]
    model.to("meta")
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    sharded = dict(model.named_parameters())
    for group, its_places in zip(optimizer.param_groups, places, strict=True):
        group["params"] = [sharded[name] for name in its_places]


with torch.device("cpu" if rank == 0 else "meta"):
    model = with_adapters()
if chosen.right:
    materialise(model)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0, foreach=False)
prepare(model, optimizer)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
end(model, loss)
