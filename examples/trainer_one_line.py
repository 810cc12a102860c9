"""Transformers' Trainer with one line for rankscope, marked by an arrow.

Healthy, on 2 workers:

    torchrun --nproc-per-node 2 examples/trainer_one_line.py
    rankscope report runs/trainer

With a loss function that forgets that Trainer multiplies what it returns by the number of workers:

    torchrun --nproc-per-node 2 examples/trainer_one_line.py --own-loss --run-dir runs/trainer-fault
    rankscope report runs/trainer-fault
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rankscope.integrations.transformers import RankscopeCallback

VOCABULARY, PAD = 67, 0


class Counting(Dataset[dict[str, list[int]]]):
    """Sequences of 8 to 32 tokens that count up by a hidden stride, with noise."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        length, start, stride = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((8, 33), (0, 64), (1, 8))
        )
        noise = torch.randint(64, (length,), generator=generator)
        noisy = torch.rand(length, generator=generator) < 0.2
        return {
            "input_ids": ((start + stride * torch.arange(length) + noisy * noise) % 64 + 3).tolist()
        }


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad a batch; padding is no label."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows]
    input_ids = torch.tensor(ids)
    mask = input_ids != PAD
    labels = input_ids.masked_fill(~mask, -100)
    return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a mean over own tokens; Trainer expects a sum, divided by the tokens of all."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--own-loss", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
    )
    arguments = TrainingArguments(
        output_dir=f"{options.run_dir}-model",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Counting(),
        data_collator=collate,
        compute_loss_func=own_loss if options.own_loss else None,
        callbacks=[RankscopeCallback(run_dir=options.run_dir)],  # <- the line
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
