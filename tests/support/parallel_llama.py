"""A small Llama under FSDP2 and tensor parallelism, its attention and MLP cut over ``tp``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 96, 16
NORMS = ("input_layernorm", "post_attention_layernorm")


def make_llama() -> LlamaForCausalLM:
    """Return the same model on each rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_batch(worker: int, number: int) -> dict[str, Tensor]:
    """Return a micro-batch, the same on all ranks of a worker."""
    draw = torch.Generator().manual_seed(1000 * worker + number)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
    return {"input_ids": ids, "labels": ids}


def shard(
    model: LlamaForCausalLM,
    mesh: DeviceMesh,
    *,
    sequence: str = "",
    **options: Any,
) -> LlamaForCausalLM:
    """Shard a model over all axes of a mesh; the last one is ``tp``."""
    tp = mesh["tp"]
    for layer in model.model.layers:
        parallelize_module(layer, tp, _layer_plan(sequence))
        if sequence == "by hand":
            for name in NORMS:
                _cut_by_hand(getattr(layer, name), tp)
    parallelize_module(model, tp, _outer_plan(sequence))
    data = mesh[mesh.mesh_dim_names[:-1]]
    for layer in model.model.layers:
        fully_shard(layer, mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


def _layer_plan(sequence: str) -> dict[str, ParallelStyle]:
    cut = dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])
    plan: dict[str, Any] = {name: ColwiseParallel() for name in cut}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    if not sequence:
        rowwise = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        return plan | rowwise
    ends = {"output_layouts": Shard(1), "use_local_output": False}
    whole = {"hidden_states": Replicate()}
    plan |= {
        "self_attn.o_proj": RowwiseParallel(**ends),
        "mlp.down_proj": RowwiseParallel(**ends),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    if sequence == "style":
        plan |= {name: SequenceParallel() for name in NORMS}
    return plan


def _outer_plan(sequence: str) -> dict[str, ParallelStyle]:
    ends = {"output_layouts": Replicate(), "use_local_output": True}
    if not sequence:
        return {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(**ends),
        }
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), **ends),
    }


def _cut_by_hand(norm: nn.Module, tp: DeviceMesh) -> None:
    """Run a norm on this rank's part of a sequence, its parameter a plain one."""
    part = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    back = PrepareModuleOutput(
        output_layouts=(Shard(1),), desired_output_layouts=(Shard(1),), use_local_output=False
    )
    parallelize_module(norm, tp, part)
    parallelize_module(norm, tp, back)


def sum_norms(model: nn.Module, tp: DeviceMesh, *, but: str = "") -> None:
    """Sum the parts of the norms' gradients over ``tp``, but for those that are named so."""
    for name, parameter in model.named_parameters():
        if any(norm in name for norm in NORMS) and not (but and but in name):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            dist.all_reduce(gradient.to_local(), group=tp.get_group())
