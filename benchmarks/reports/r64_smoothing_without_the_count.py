# ruff: noqa: D102
"""R64, transformers#46731: the smoothed loss is a mean over a micro-batch, and nobody divides it.

huggingface/transformers#46731: where a model takes num_items_in_batch, the Trainer leaves the
division to the loss. The label smoother ignores the count, and takes the mean of its micro-batch:
gradients are as many times too large as micro-batches are accumulated.
With --right, the smoother divides by the count, as transformers does since.
"""

import tempfile
from typing import Any

import torch
from reports_common import VOCABULARY, end, launched, options, text
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SMOOTHING = 0.1

chosen = options(steps=60, samples=4, micro_batches=4)
rank, world = launched()
torch.manual_seed(0)


class OldSmoother:
    """Smooths over the labels of the micro-batch alone."""

    def __call__(
        self, outputs: Any, labels: Tensor, shift_labels: bool = False, **rest: Any
    ) -> Tensor:
        logits = outputs["logits"]
        if shift_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING)


def examples(samples: int) -> list[dict[str, Tensor]]:
    """Cut texts to different lengths, with padding that is no label."""
    lengths = torch.randint(8, 25, (samples,), generator=torch.Generator().manual_seed(2))
    out = []
    for tokens, length in zip(text(samples), lengths.tolist(), strict=True):
        labels = tokens.clone()
        labels[length:] = -100
        seen = (torch.arange(len(tokens)) < length).long()
        out.append({"input_ids": tokens, "labels": labels, "attention_mask": seen})
    return out


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=chosen.steps, learning_rate=5e-3, use_cpu=True,
        ddp_backend="gloo", per_device_train_batch_size=chosen.samples, report_to="none",
        disable_tqdm=True,
        gradient_accumulation_steps=chosen.micro_batches, label_smoothing_factor=SMOOTHING,
        logging_steps=30, save_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples(2048))
    if not chosen.right:
        trainer.label_smoother = OldSmoother()
    result = trainer.train()
end(model, torch.tensor(result.training_loss))
