# ruff: noqa: D102
"""Trainer: low-rank adapters on a frozen bfloat16 base; the best checkpoint at the end."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import VOCABULARY, History, begin, end, sentences
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.pytorch_utils import Conv1D


class Adapter(nn.Module):
    """A frozen layer in half precision, and a product of two thin matrices in full."""

    def __init__(self, base: Conv1D, rank: int = 8) -> None:
        super().__init__()
        wide, narrow = base.weight.shape
        self.base = base
        self.down = nn.Parameter(torch.randn(wide, rank) / wide**0.5)
        self.up = nn.Parameter(torch.zeros(rank, narrow))

    def forward(self, hidden: Tensor) -> Tensor:
        thin = hidden.float() @ self.down @ self.up
        whole: Tensor = self.base(hidden) + 2.0 * thin.to(hidden.dtype)
        return whole


def adapted(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    model.to(torch.bfloat16).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapter(block.attn.c_attn)
        block.mlp.c_fc, block.mlp.c_proj = Adapter(block.mlp.c_fc), Adapter(block.mlp.c_proj)
    return model


class Losses(TrainerCallback):  # type: ignore[misc]
    """Keeps what the trainer logs."""

    def __init__(self, history: History) -> None:
        self.history = history

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.history.note(logs["loss"])


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["tokens"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for at, row in enumerate(rows):
        many = len(row["tokens"])
        tokens[at, :many], mask[at, :many] = row["tokens"], 1
        labels[at, row["prompt"] : many] = row["tokens"][row["prompt"] :]
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 25, (count,), generator=draw).tolist()
    prompts = torch.randint(1, 5, (count,), generator=draw).tolist()
    whole = sentences(1400)[-count:] if seed else sentences(1400)[:count]
    return [
        {"tokens": tokens[:many], "prompt": few}
        for tokens, many, few in zip(whole, lengths, prompts, strict=True)
    ]


def main() -> None:
    output = Path(tempfile.gettempdir()) / f"h34-{os.environ.get('MASTER_PORT', '0')}"
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=100,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        neftune_noise_alpha=1.0,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=25,
        save_steps=25,
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    begin()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model, history = adapted(GPT2LMHeadModel(config)), History()
    Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=rows(1280, 0),
        eval_dataset=rows(64, 1),
        callbacks=[Losses(history)],
    ).train()
    if dist.get_rank() == 0:
        shutil.rmtree(output, ignore_errors=True)
    end(history, model)


if __name__ == "__main__":
    main()
