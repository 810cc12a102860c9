# ruff: noqa: D102
"""Transformers' Trainer: preferences against a frozen reference, with evaluation on the way."""

import copy
import tempfile
from typing import Any

import torch
from common import VOCABULARY, History, end, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PROMPT, LENGTH, STEPS = 8, 24, 80

torch.set_num_threads(1)
torch.manual_seed(0)


def pairs(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Make answers that follow the chain, and worse ones with twice as much noise."""
    good, draw = sentences(count, LENGTH, seed), torch.Generator().manual_seed(seed + 1)
    odd = torch.rand(count, LENGTH, generator=draw) < 0.4
    odd[:, :PROMPT] = False
    bad = torch.where(odd, torch.randint(VOCABULARY, good.shape, generator=draw), good)
    ends = torch.randint(PROMPT + 4, LENGTH + 1, (count, 1), generator=draw)
    answer = (torch.arange(LENGTH) >= PROMPT) & (torch.arange(LENGTH) < ends)
    return [
        {"chosen": one, "rejected": other, "answer": part}
        for one, other, part in zip(good, bad, answer, strict=True)
    ]


class Preference(Trainer):  # type: ignore[misc]
    """Raises the chosen answer over the rejected one, relative to the reference."""

    def __init__(self, *given: Any, reference: nn.Module, **rest: Any) -> None:
        super().__init__(*given, **rest)
        self.reference = reference.eval().requires_grad_(False)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over pairs
        self.history = History()

    @staticmethod
    def scores(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum up the log-probabilities of both answers; give those of single tokens as well."""
        tokens = torch.cat([inputs["chosen"], inputs["rejected"]])
        mask = torch.cat([inputs["answer"]] * 2)[:, 1:].float()
        logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        every = logits.gather(2, tokens[:, 1:, None]).squeeze(2) * mask
        return every.sum(1), every.sum(1) / mask.sum(1)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        now, each = self.scores(model, inputs)
        with torch.no_grad():
            before, _one = self.scores(self.reference, inputs)
        better, worse = (now - before).chunk(2)
        loss = -F.logsigmoid(0.1 * (better - worse)).mean() - 0.2 * each.chunk(2)[0].mean()
        if model.training:
            self.history.note(loss)
        return (loss, {"margin": better - worse}) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None


shape = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(shape)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=8,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=20,
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
        label_names=["answer"],
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Preference(
        model,
        arguments,
        reference=copy.deepcopy(model),
        train_dataset=pairs(1000, 1),
        eval_dataset=pairs(64, 7),
    )
    trainer.train()
end(trainer.history, model)
