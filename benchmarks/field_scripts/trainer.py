"""Transformers' Trainer with each of its ways to average a loss: FOLDER KIND MICRO_BATCHES."""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

folder, kind, micro = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder / "model")
texts = [json.loads(line)["text"] for line in (folder / "text" / "train.jsonl").open()]


class PerMicroBatch(Trainer):
    """As for models that take no number of tokens: each micro-batch's own mean."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False


def collate(batch):
    inputs = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=64)
    inputs.pop("token_type_ids", None)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels}


more = {
    "device": {"average_tokens_across_devices": False},
    "smooth": {"label_smoothing_factor": 0.1},
    "compile": {"torch_compile": True},
    "checkpoint": {"gradient_checkpointing": True},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "eight_bit": {"optim": "adamw_torch_8bit"},
}
arguments = TrainingArguments(
    str(folder / "output"),
    max_steps=24,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=micro,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    **more.get(kind, {}),
)
trainer = PerMicroBatch if kind == "micro" else Trainer
model = AutoModelForCausalLM.from_pretrained(folder / "model")
trainer(model, arguments, train_dataset=texts, data_collator=collate).train()
