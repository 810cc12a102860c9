# ruff: noqa: D101, D102
"""R04, ms-swift#10050: after a resume in the second epoch the loader has the first one's order.

Launch it twice with the same --folder: the first launch stops at step 44, in the second epoch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from reports_common import LanguageWithLoss, end, launched, options, text
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer

chosen = options()
rank, world = launched()
torch.manual_seed(0)
data = [{"tokens": tokens} for tokens in text(512)]  # 32 steps of 2 × 8 samples an epoch


class Batches:
    """A rank's batches of an epoch, whose order follows from the epoch."""

    def __init__(self, skip: int = 0, epoch: int = 0) -> None:
        self.skip, self.epoch = skip, epoch

    def __len__(self) -> int:
        return len(data) // 8 // world - self.skip

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.view(-1, 8)[rank::world].tolist()[self.skip :])


class Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.epoch = epoch  # type: ignore[union-attr]


def skipping(loader: Loader, count: int = 0) -> DataLoader[Any]:
    """Build the loader anew, without the first batches; the wrong one forgets the epoch."""
    batches = Batches(count, epoch=1 if chosen.right else 0)
    return DataLoader(data, batch_sampler=batches)  # type: ignore[arg-type]


class Stop(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        control.should_training_stop = state.global_step == 44


class Own(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Loader:
        return Loader(data, batch_sampler=Batches())  # type: ignore[arg-type]


trainer.skip_first_batches = skipping
arguments = TrainingArguments(
    output_dir=str(chosen.folder), max_steps=96, save_steps=44, learning_rate=3e-3, use_cpu=True,
    ddp_backend="gloo", per_device_train_batch_size=8, report_to="none", disable_tqdm=True,
    remove_unused_columns=False, logging_steps=32, lr_scheduler_type="constant",
)  # fmt: skip
saved = chosen.folder / "checkpoint-44"
model = LanguageWithLoss()
own = Own(model, arguments, train_dataset=data, callbacks=[] if saved.exists() else [Stop()])
result = own.train(resume_from_checkpoint=str(saved) if saved.exists() else None)
end(model, torch.tensor(result.training_loss))
