"""The readers of the frameworks' pages: each prepares a block's names and trains on, on one rank.

Functions import the frameworks, which take seconds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from documentation import prepared
from documentation.framework_pages import RunBlock, Signals, run_page

BATCH, STEPS = 2, 4
RUN, RAY = "runs/sft", "docs/integrations/ray.md"


def dataset(labels: str = "labels", ignored: int = -100) -> list[dict[str, Tensor]]:
    """Return sixteen samples: two steps of two workers; some of their tokens are no labels."""
    rows = [{"input_ids": row["input_ids"], labels: row["labels"]} for row in prepared.dataset()]
    for number, row in enumerate(rows):
        row[labels] = row[labels].clone()
        row[labels][: number % 3] = ignored
    return rows


def model() -> nn.Module:
    torch.manual_seed(0)
    return prepared.Model()


def tokens(labels: Tensor) -> float:
    return float((labels != -100).sum())


class Kept(nn.Module):
    """A model that keeps the losses that it returned, and the number of their label tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.seen: Signals = {"loss": [], "loss_weight": []}

    def forward(self, input_ids: Tensor, labels: Tensor) -> prepared.Output:
        output: prepared.Output = self.inner(input_ids, labels)
        self.seen["loss"].append(output.loss.item())
        self.seen["loss_weight"].append(tokens(labels))
        return output


# transformers.md


def train_with_trainer(run: RunBlock) -> tuple[str, Signals]:
    from transformers import TrainingArguments

    from integrations import hugging_face_jobs as jobs

    jobs.start_again()
    arguments = TrainingArguments(
        output_dir="model",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = prepared.dataset()
    run({"model": jobs.make_model(), "arguments": arguments, "dataset": rows})
    own = BATCH * (len(rows[0]["labels"]) - 1)  # the first token of a sequence is predicted by none
    return RUN, {"num_samples": [BATCH] * STEPS, "loss_weight": [own] * STEPS}


# accelerate.md


def accelerated() -> dict[str, Any]:
    from accelerate import Accelerator

    from integrations import hugging_face_jobs as jobs

    jobs.start_again()
    inner = Kept()
    return {
        "accelerator": Accelerator(cpu=True),
        "model": inner,
        "optimizer": torch.optim.AdamW(inner.parameters()),
        "loader": DataLoader(dataset(), batch_size=BATCH),
        "seen": inner.seen,
    }


def train_with_accelerate(run: RunBlock) -> tuple[str, Signals]:
    names = accelerated()
    run(names)
    for batch in names["loader"]:
        names["accelerator"].backward(names["model"](**batch).loss)
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    names["accelerator"].end_training()
    return RUN, names["seen"]


def divide_by_the_tokens_of_all(run: RunBlock) -> tuple[str, Signals]:
    from rankscope.integrations.accelerate import watch

    names = accelerated()
    given = [names[name] for name in ("model", "optimizer", "loader")]
    wrapped, optimizer, loader = names["accelerator"].prepare(*given)
    watch_options: dict[str, Any] = {"loader": loader, "run_dir": RUN}
    names["scope"] = watch(names["accelerator"], wrapped, optimizer, **watch_options)
    multipliers = []
    for batch in loader:
        own = torch.tensor(tokens(batch["labels"]))
        everyones = own.clone()
        dist.all_reduce(everyones)
        logits, labels = wrapped(**batch).logits.flatten(0, 1), batch["labels"].flatten()
        sums = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        run(names | {"batch": batch, "sum_of_losses": sums, "tokens_of_all": everyones})
        optimizer.step()
        optimizer.zero_grad()
        multipliers.append(float(own / everyones) * dist.get_world_size())
    names["scope"].close()
    return RUN, {**names["seen"], "grad_scale": multipliers}


# lightning.md


def lightning_module() -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Kept()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Module()


def train_with_lightning(run: RunBlock) -> tuple[str, Signals]:
    module = lightning_module()
    run({"module": module, "loader": DataLoader(dataset(), batch_size=BATCH)})
    return RUN, {"loss": module.model.seen["loss"]}


def count_tokens_in_lightning(run: RunBlock) -> tuple[str, Signals]:
    from lightning.pytorch import Trainer

    names: dict[str, Any] = {}
    run(names)
    module = lightning_module()
    Trainer(
        strategy="ddp",
        devices=2,
        max_epochs=1,
        callbacks=[names["callback"]],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(dataset(), batch_size=BATCH))
    return RUN, module.model.seen


# ray.md


def train_under_ray(
    run: RunBlock, as_a_worker: Callable[[Callable[[], None]], None]
) -> tuple[str, Signals]:
    """Let ``as_a_worker`` run the function of the page, to its end, in which Ray closes the run."""
    import ray.train

    made = []

    def make_model() -> nn.Module:
        made.append(Kept())
        return made[-1]

    def make_loader() -> Iterator[dict[str, Tensor]]:
        rows = dataset()
        return iter(DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows)))

    names: dict[str, Any] = {"make_model": make_model, "make_loader": make_loader}
    run(names)
    as_a_worker(lambda: names["train_loop_per_worker"]({}))
    [kept] = made
    storage = ray.train.get_context().get_storage().experiment_fs_path
    return f"{storage}/rankscope", kept.seen


# deepspeed.md


class LossAlone(nn.Module):
    """A model that returns its loss as a tensor, with another name for labels; 0 is none."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.kept(inputs, targets.masked_fill(targets == 0, -100)).loss
        return loss


CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def train_with_engine(names: dict[str, Any], loss_of: Callable[..., Tensor]) -> None:
    for batch in names["loader"]:
        names["engine"].backward(loss_of(batch))
        names["engine"].step()
    names["scope"].close()
    names["engine"].destroy()


def train_with_deepspeed(run: RunBlock) -> tuple[str, Signals]:
    names: dict[str, Any] = {"model": Kept(), "dataset": dataset(), "config": CONFIG}
    run(names)
    train_with_engine(names, lambda batch: names["engine"](**batch).loss)
    return RUN, names["model"].seen


def count_tokens_in_deepspeed(run: RunBlock) -> tuple[str, Signals]:
    import deepspeed

    made, rows = LossAlone(), dataset("targets", ignored=0)
    engine, _, loader, _ = deepspeed.initialize(model=made, training_data=rows, config=CONFIG)
    names = {"engine": engine, "loader": loader}
    run(names)
    train_with_engine(names, lambda batch: engine(*batch.values()))
    return RUN, made.kept.seen


# torchtitan.md


def train_in_torchtitans_shape(run: RunBlock) -> tuple[str, Signals]:
    from examples.torchtitan_style import Config, ParallelDims, Trainer

    config = Config(ParallelDims(dp_replicate=1, dp_shard=dist.get_world_size()), steps=STEPS)
    names: dict[str, Any] = {"Trainer": Trainer, "config": config}
    run(names)
    return "runs/pretraining", {"optimizer_steps": [1] * names["trainer"].step}


USES = {
    "docs/integrations/accelerate.md": [train_with_accelerate, divide_by_the_tokens_of_all],
    "docs/integrations/deepspeed.md": [train_with_deepspeed, count_tokens_in_deepspeed],
    "docs/integrations/lightning.md": [train_with_lightning, count_tokens_in_lightning],
    "docs/integrations/torchtitan.md": [train_in_torchtitans_shape],
    "docs/integrations/transformers.md": [train_with_trainer],
}
"""By page: what to do with each of its Python blocks, in order."""


def run_framework(page: str, folder: str) -> dict[str, dict[str, Any]]:
    return run_page(page, folder, USES[page])


def run_ray(folder: str, as_a_worker: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    return run_page(RAY, folder, [partial(train_under_ray, as_a_worker=as_a_worker)])
