"""Transformers' Trainer: a small Llama, sequences of uneven lengths."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--own-mean", action="store_true", help="each worker's mean, not the tokens'")
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", choices=("", "optimizer", "samples", "permuted"), default="")
parser.add_argument("--dropout", type=float, default=0.0)
chosen = parser.parse_args()
torch.set_num_threads(1)


class Counting(Dataset[dict[str, list[int]]]):
    """Sequences of 8 to 32 tokens that count up by a hidden stride."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw = torch.Generator().manual_seed(index)
        length, start, stride = (
            int(torch.randint(low, high, (), generator=draw))
            for low, high in ((8, 33), (0, 64), (1, 8))
        )
        return {"input_ids": ((start + stride * torch.arange(length)) % 64 + 3).tolist()}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in rows])
    mask = ids != 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}


def own_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


more: dict[str, Any] = {}
if chosen.fsdp:
    config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    more = {"fsdp": "full_shard", "fsdp_config": config}
if chosen.save_at:
    more = {**more, "save_strategy": "steps", "save_steps": chosen.save_at}
if chosen.forget == "samples":
    more["ignore_data_skip"] = True
rank = int(os.environ.get("RANK", "0"))
if chosen.forget and rank == 0:  # the others wait for its process group
    saved = chosen.folder / f"checkpoint-{chosen.save_at}"
    if chosen.forget == "optimizer":
        (saved / "optimizer.pt").unlink()
    if chosen.forget == "permuted":
        first, second = (saved / f"rng_state_{one}.pth" for one in range(2))
        state = first.read_bytes()
        second.replace(first)
        second.write_bytes(state)
torch.manual_seed(0)
trainer = Trainer(
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
            attention_dropout=chosen.dropout,
        )
    ),
    TrainingArguments(
        str(chosen.folder),
        max_steps=20,
        per_device_train_batch_size=chosen.batch,
        gradient_accumulation_steps=chosen.accumulate,
        learning_rate=1e-3,
        data_seed=0,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    ),
    train_dataset=Counting(),
    data_collator=collate,
    compute_loss_func=own_mean if chosen.own_mean else None,
)
torch.manual_seed(1 + rank)
trainer.train(resume_from_checkpoint=chosen.resume or None)
