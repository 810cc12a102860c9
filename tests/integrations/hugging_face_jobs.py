"""Trainings with Hugging Face's packages, on one rank, of tiny models that are made on the spot.

Imported by ranks alone: these packages take seconds to import.
"""

import contextlib
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import rankscope
from integrations.adapters import OPTIONS as SHARED_OPTIONS
from integrations.run_scripts.tiny_llama import NUM_TOKENS, make_model

OPTIONS = {**SHARED_OPTIONS, "plan": None}
RANKS = 2
STEPS, ACCUMULATE, BATCH = 6, 2, 2


def make_data(count=192):
    """Return sequences of 6 to 24 tokens, no two of them alike."""
    generator = torch.Generator().manual_seed(0)

    def row():
        length = int(torch.randint(6, 25, (), generator=generator))
        return torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist()

    return [{"input_ids": ids, "labels": ids} for ids in (row() for _ in range(count))]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Keeping:
    """Beside a trainer: keeps the batches of every step, and what they were counted to hold."""

    kept: list[tuple[list[Any], Any]]

    def get_batch_samples(self, *args, **kwargs):
        batches, items = super().get_batch_samples(*args, **kwargs)
        self.kept = [*getattr(self, "kept", []), ([dict(batch) for batch in batches], items)]
        return batches, items


class KeepingTrainer(Keeping, Trainer):
    pass


class KeepingSFTTrainer(Keeping, SFTTrainer):
    pass


class Breaking(Trainer):
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise ZeroDivisionError("a fault of the training's")
        return super().training_step(*args, **kwargs)


def settings(folder, **changes):
    return {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "seed": 1,
        "max_grad_norm": 0.1,
        "dataloader_pin_memory": False,
        **changes,
    }


def make_trainer(folder, callbacks=(), *, kind=Trainer, more=None, **changes):
    model = make_model()
    return kind(
        model,
        TrainingArguments(**settings(folder, **changes)),
        train_dataset=make_data(),
        eval_dataset=make_data(4),
        data_collator=collate,
        optimizers=(make_optimizer(model), None),
        callbacks=list(callbacks),
        **(more or {}),
    )


def make_sft_trainer(folder, callbacks=(), **changes):
    model = make_model()
    words = {f"w{number}": number for number in range(NUM_TOKENS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")),
        pad_token="w0",
        eos_token="w2",
    )
    config = {"max_length": None, "activation_checkpointing": False, **changes}
    return KeepingSFTTrainer(
        model,
        SFTConfig(**settings(folder, **config)),
        train_dataset=Dataset.from_list(make_data()),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def mean_over_own(outputs, labels, num_items_in_batch=None):
    """A ``compute_loss_func`` that forgets what Trainer multiplies its result by."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train_by_hand(run_dir, model, kept, loss_of, optimizer=None):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer or make_optimizer(model)
    scope = rankscope.watch(ddp, optimizer, run_dir=run_dir, **OPTIONS)
    for batches, items in kept:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss_of(scope, ddp, batch, items).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        ddp.zero_grad()
    scope.close()


def model_loss(scope, ddp, batch, items):
    return ddp(**batch, num_items_in_batch=items).loss * RANKS


def fused_loss(scope, ddp, batch, items):
    """The loss that ``SFTTrainer`` computes, given to the scope with what it was scaled by."""
    output = ddp(**batch, use_cache=False, fused_lm_head=True)
    loss = (-output.log_probs).sum() / items.clamp(min=1) * RANKS
    own = (batch["labels"][..., 1:] != -100).sum().double()
    scope.loss(loss, own, factor=own * RANKS / items)
    return loss


def start_again():
    """Let accelerate forget what it knows of this process."""
    os.environ["WORLD_SIZE"] = str(RANKS)
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def train_with_accelerate(watch, *, steps=STEPS):
    start_again()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = make_model()
    torch.manual_seed(7)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    scope = watch(accelerator, model, optimizer, loader)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == steps * ACCUMULATE:
            break
    return accelerator, accelerator.unwrap_model(model), scope
