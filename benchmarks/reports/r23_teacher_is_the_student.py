# ruff: noqa: D101, D102
"""R23, trl#5862: the teacher is the student without adapter; its eval() is the student's, too."""

import tempfile
from typing import Any

import torch
from reports_common import Adapted, Language, end, launched, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

chosen = options(steps=50, samples=8)
rank, world = launched()
torch.manual_seed(0)


class Switched(Adapted):
    scale = 4

    def forward(self, hidden: Tensor) -> Tensor:
        adapted: Tensor = self.layer(hidden) + self.scale * self.lora_out(self.lora_in(hidden))
        return adapted


class Student(nn.Module):
    """A frozen language model with adapters, which are off for the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language(dropout=0.2).requires_grad_(False)
        for block in self.language.blocks:
            block.up, block.down = Switched(block.up), Switched(block.down)  # type: ignore[arg-type]
        self.language.head.requires_grad_(True)

    def adapters(self, on: bool) -> None:
        for module in self.modules():
            if isinstance(module, Switched):
                module.scale = 4 if on else 0

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.language(tokens)
        return logits


class Distillation(Trainer):  # type: ignore[misc]
    @torch.no_grad()
    def teach(self, student: Student, tokens: Tensor) -> Tensor:
        training = student.training
        student.eval()
        student.adapters(on=False)
        logits: Tensor = student(tokens)
        student.adapters(on=True)
        if chosen.right:
            student.train(training)
        return logits

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **rest: Any) -> Tensor:
        tokens = inputs["tokens"]
        taught = self.teach(self.accelerator.unwrap_model(model), tokens)[:, :-1].softmax(-1)
        logits = model(tokens)[:, :-1]
        right = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        near = F.kl_div(logits.log_softmax(-1), taught, reduction="none").sum(-1).mean()
        return right + 0.1 * near


data = [{"tokens": tokens} for tokens in text(2048)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=chosen.steps, learning_rate=1e-2, use_cpu=True,
        ddp_backend="gloo", per_device_train_batch_size=chosen.samples, report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False, logging_steps=30, save_strategy="no", weight_decay=0.01,
    )  # fmt: skip
    student = Student()
    result = Distillation(student, arguments, train_dataset=data).train()
end(student, torch.tensor(result.training_loss))
