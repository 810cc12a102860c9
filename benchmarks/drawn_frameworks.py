# ruff: noqa: D102
"""One training in a framework that a seed draws: Transformers' Trainer, Lightning, Accelerate."""

import random
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-untyped]
from accelerate.utils import DistributedDataParallelKwargs, set_seed  # type: ignore[import-untyped]
from drawn_common import (
    STEPS,
    Choices,
    Job,
    Language,
    Launch,
    Odd,
    Rows,
    collate,
    draw_from,
    launch,
    token_loss,
)
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

CHOICES: dict[str, Choices] = {
    "trainer": {
        "model": ("llama", "gpt2", "bert"),
        "ranks": (2, 2, 3),
        "resumed": (False, False, True),
        "gradient_accumulation_steps": (1, 1, 2, 3),
        "grouped": (False, True),
        "max_grad_norm": (1.0, 0.1, 0.0),
        "bf16": (False, False, True),
        "label_smoothing_factor": (0.0, 0.0, 0.1),
        "eval_strategy": ("no", "steps", "epoch"),
        "save_strategy": ("no", "steps"),
        "load_best_model_at_end": (False, True),
        "optim": ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd"),
        "lr_scheduler_type": ("linear", "cosine", "constant_with_warmup", "polynomial"),
        "warmup_steps": (0, 5),
        "neftune_noise_alpha": (None, None, 5.0),
        "gradient_checkpointing": (False, False, True),
        "fsdp": (False, False, False, True),
        "average_tokens_across_devices": (True, True, False),
        "dataloader_num_workers": (0, 0, 1),
        "dataloader_drop_last": (False, True),
        "logging_steps": (1, 10),
        "uneven": (False, True),
        "dropout": (0.0, 0.1),
        "rows": (640, 200),
        "frozen": (False, False, True),
    },
    "lightning": {
        "ranks": (2, 2, 3),
        "resumed": (False, False, True),
        "strategy": ("ddp", "ddp", "ddp_find_unused_parameters_true", "fsdp2"),
        "manual": (False, False, True),
        "accumulate": (1, 1, 2, "scheduled"),
        "clip": (None, 1.0, 0.05, "value"),
        "precision": ("32-true", "32-true", "bf16-mixed"),
        "follows": ("nothing", "swa"),
        "schedule": ("none", "step", "epoch"),
        "validates": (False, True),
        "optimizer": ("adamw", "sgd", "adagrad"),
        "sampler": ("shuffled", "in order"),
        "synced": (False, True),
        "sanity": (0, 2),
        "workers": (0, 0, 1),
        "uneven": (False, True),
        "dropout": (0.0, 0.1),
        "rows": (640, 200),
    },
    "accelerate": {
        "ranks": (2, 2, 3),
        "resumed": (False, False, True),
        "accumulate": (1, 1, 2, 3),
        "each_batch": (False, True),
        "plugin": ("ddp", "ddp", "ddp bf16", "fsdp2"),
        "mixed": ("no", "no", "bf16"),
        "clip": ("none", "norm", "value"),
        "schedule": ("none", "prepared", "own"),
        "split": (False, False, True),
        "dispatch": (None, None, True),
        "even": (True, False),
        "gathers": (False, True),
        "evaluates": (False, True),
        "by_tokens": (False, True),
        "seeded_per_rank": (True, False),
        "optimizer": ("adamw", "sgd"),
        "uneven": (False, True),
        "dropout": (0.0, 0.1),
        "rows": (640, 200),
    },
}


def draw(seed: int) -> Job:
    """Draw a job; choices that do not go together give way."""
    source = random.Random(f"frameworks {seed}")
    kind = source.choice(("trainer", "trainer", "lightning", "accelerate"))
    given = draw_from(CHOICES[kind], source)
    ranks = given.pop("ranks")
    if kind == "trainer":
        _fit_trainer(given)
    elif kind == "lightning":
        _fit_lightning(given)
    elif given["plugin"] == "fsdp2":
        given["clip"] = "none" if given["clip"] == "value" else given["clip"]
    return Job(kind, (ranks, ranks) if given.pop("resumed") else (ranks,), given)


def _fit_trainer(given: dict[str, Any]) -> None:
    if given["load_best_model_at_end"]:
        given |= {"eval_strategy": "steps", "save_strategy": "steps"}
    if given["fsdp"]:
        given |= {"frozen": False, "gradient_checkpointing": False, "model": "llama"}
        given |= {"load_best_model_at_end": False, "neftune_noise_alpha": None}
        if given["optim"] in ("adafactor", "adamw_torch_fused"):
            given["optim"] = "adamw_torch"
    if given["model"] == "bert":
        given["label_smoothing_factor"] = 0.0


def _fit_lightning(given: dict[str, Any]) -> None:
    if given["manual"]:
        given |= {"accumulate": 1, "clip": None if given["clip"] == "value" else given["clip"]}
    if given["strategy"] == "fsdp2":
        given |= {"follows": "nothing", "resumed": False}
        given["clip"] = None if given["clip"] == "value" else given["clip"]
        given["precision"] = "32-true"
    if given["follows"] == "swa":
        given |= {"manual": False, "schedule": "none", "resumed": False}
    if given["accumulate"] == "scheduled" and given["follows"] == "swa":
        given["accumulate"] = 2


def faults_of(job: Job) -> list[str]:
    """Return the faults that this job can have."""
    sharded = "fsdp2" in job.given.values() or job.given.get("fsdp")
    possible = {
        "loss": True,
        "labels": True,
        "sampler": True,
        "rate": job.kind != "trainer" or not sharded,
        "weight": not sharded,
        "dropout off": job.dropout > 0,
    }
    return [fault for fault, can in possible.items() if can]


def _transformer(job: Job) -> Any:
    drop = job.dropout
    if job.model == "llama":
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                attention_dropout=drop,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=63,
            )
        )
        early = model.model.embed_tokens
    elif job.model == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64,
                n_positions=32,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=drop,
                embd_pdrop=drop,
                attn_pdrop=drop,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
        early = model.transformer.wpe
    else:
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=32,
                hidden_dropout_prob=drop,
                attention_probs_dropout_prob=drop,
                pad_token_id=63,
            )
        )
        early = model.bert.embeddings.position_embeddings
    if job.frozen:
        early.requires_grad_(False)
    return model


class OddTrainer(Trainer):
    """A Trainer that may have a fault."""

    odd: Odd

    def get_train_dataloader(self) -> Any:
        if self.odd.fault == "sampler":
            return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=collate)
        return super().get_train_dataloader()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        inputs = {**inputs, "labels": self.odd.labels(inputs["labels"])}
        found = super().compute_loss(model, inputs, *args, **more)
        if self.odd.factor == 1 or not model.training:
            return found
        return found * self.odd.factor


class OddSteps(TrainerCallback):
    """What a fault changes at a step."""

    def __init__(self, odd: Odd) -> None:
        self.odd = odd

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.odd.fault:
            self.odd.at_step(state.global_step, more["model"], more["optimizer"])


def train_with_trainer(this: Launch) -> None:
    """Train with Transformers' Trainer; a resumption goes on from its last checkpoint."""
    job, (_, end) = this.job, this.steps
    options = {
        name: value
        for name, value in job.given.items()
        if name not in ("model", "grouped", "fsdp", "uneven", "dropout", "rows", "frozen")
    }
    if job.fsdp:
        config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"fsdp": "full_shard", "fsdp_config": config}
    if job.grouped:
        options |= {"train_sampling_strategy": "group_by_length"}
    if len(job.worlds) > 1:
        options |= {"save_strategy": "steps", "save_steps": STEPS // 2}
        if job.load_best_model_at_end:
            options |= {"eval_steps": STEPS // 2}
    else:
        options |= {"save_steps": 20, "eval_steps": 20}
    args = TrainingArguments(
        str(this.folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        learning_rate=3e-3 if job.optim != "sgd" else 3e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    set_seed(5)
    odd = Odd(this.fault, args.process_index)
    callbacks: list[TrainerCallback] = [OddSteps(odd)]
    if not this.is_last:
        callbacks.append(_StopAt(end))
    trainer = OddTrainer(
        _transformer(job),
        args,
        train_dataset=Rows(job.rows, uneven=job.uneven, named=True),
        eval_dataset=Rows(40, uneven=job.uneven, named=True, seed=9),
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.odd = odd
    trainer.train(resume_from_checkpoint=True if this.number else None)


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


class Module(lightning.LightningModule):
    """A small language model, with the options of a job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.automatic_optimization = job, not job.manual
        self.model = Language(dropout=job.dropout)
        self.odd: Any = None

    def configure_model(self) -> None:
        if self.job.strategy == "fsdp2":
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> Any:
        job = self.job
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
        rate = {"sgd": 5e-2, "adagrad": 1e-2}.get(job.optimizer, 2e-3)
        kind: Any = kinds.get(job.optimizer, torch.optim.AdamW)
        optimizer = kind(self.parameters(), lr=rate)
        if job.schedule == "none":
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(
            optimizer, 0.98 if job.schedule == "step" else 0.7
        )
        return [optimizer], [{"scheduler": schedule, "interval": job.schedule}]

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor | None:
        self.odd = self.odd or Odd(self.trainer.fault, self.global_rank)
        optimizer: Any = self.optimizers()
        self.odd.at_step(self.global_step, self.model, optimizer)
        loss = self.odd.factor * token_loss(self.model(tokens), self.odd.labels(tokens))
        self.log("loss", loss, sync_dist=self.job.synced)
        if not self.job.manual:
            return loss  # type: ignore[no-any-return]
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.job.clip is not None:
            self.clip_gradients(optimizer, self.job.clip, "norm")
        optimizer.step()
        if self.job.schedule == "step":
            self.lr_schedulers().step()
        return None

    def on_train_epoch_end(self) -> None:
        if self.job.manual and self.job.schedule == "epoch":
            self.lr_schedulers().step()

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("held_out", token_loss(self.model(tokens), tokens), sync_dist=True)


def train_with_lightning(this: Launch) -> None:
    """Train with Lightning; a resumption goes on from a checkpoint."""
    job, (_, end) = this.job, this.steps
    lightning.seed_everything(5)
    [world] = {*job.worlds}
    strategy: Any = job.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    callbacks: list[Callback] = []
    if job.follows == "swa":
        callbacks.append(StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=1))
    if job.accumulate == "scheduled":
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    if len(job.worlds) > 1:
        callbacks.append(ModelCheckpoint(this.folder, "saved", every_n_train_steps=STEPS // 2))
    more: dict[str, Any] = {}
    if not job.manual and job.clip is not None:
        more["gradient_clip_val"] = 0.05 if job.clip == "value" else job.clip
        more["gradient_clip_algorithm"] = "value" if job.clip == "value" else "norm"
    if job.accumulate != "scheduled":
        more["accumulate_grad_batches"] = job.accumulate
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_steps=end,
        logger=False,
        callbacks=callbacks,
        precision=job.precision,
        enable_checkpointing=len(job.worlds) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=job.sanity,
        limit_val_batches=2 if job.validates else 0,
        use_distributed_sampler=this.fault != "sampler",
        **more,
    )
    trainer.fault = this.fault
    loader = DataLoader(
        Rows(job.rows, uneven=job.uneven, named=False),
        4,
        shuffle=job.sampler == "shuffled",
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
    )
    held_out = DataLoader(Rows(40, uneven=job.uneven, named=False, seed=9), 8)
    saved = this.folder / "saved.ckpt" if this.number else None
    trainer.fit(Module(job), loader, held_out, ckpt_path=saved)


def _accelerator(job: Job) -> Accelerator:
    plugin, handlers = None, []
    if job.plugin == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            reshard_after_forward=True,
        )
    elif job.plugin == "ddp bf16":
        handlers.append(DistributedDataParallelKwargs(comm_hook="bf16"))
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        mixed_precision=job.mixed,
        fsdp_plugin=plugin,
        kwargs_handlers=handlers,
        dataloader_config=_loader_settings(job),
    )


def _loader_settings(job: Job) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return DataLoaderConfiguration(
        split_batches=job.split, dispatch_batches=job.dispatch, even_batches=job.even
    )


class _Parts(NamedTuple):
    """What Accelerate has prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    schedule: Any

    def train_on(self, tokens: Tensor, job: Job, odd: Odd, step: int) -> bool:
        """Train on a micro-batch; return whether the optimizer was called."""
        accelerator, model = self.accelerator, self.model
        with accelerator.accumulate(model):
            _accelerate_one(accelerator, job, odd, model, tokens)
            if accelerator.sync_gradients:
                odd.at_step(step, accelerator.unwrap_model(model), self.optimizer)
                if job.clip == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                elif job.clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
            self.optimizer.step()
            own = job.schedule == "own" and accelerator.sync_gradients
            if job.schedule == "prepared" or own:
                self.schedule.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients and job.evaluates and (step + 1) % 16 == 0:
            _evaluate(model)
        return bool(accelerator.sync_gradients)


def _rest_of_epoch(accelerator: Accelerator, loader: Any, epoch: int, taken: int) -> Any:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    return accelerator.skip_first_batches(loader, taken) if taken else loader


def train_with_accelerate(this: Launch) -> None:
    """Train in a loop with Accelerate; a resumption loads its state and skips batches."""
    job, (first, end) = this.job, this.steps
    accelerator = _accelerator(job)
    set_seed(5)
    model: Any = Language(dropout=job.dropout)
    if job.seeded_per_rank:
        set_seed(5, device_specific=True)
    odd = Odd(this.fault, accelerator.process_index)
    kind: Any = torch.optim.SGD if job.optimizer == "sgd" else torch.optim.AdamW
    optimizer: Any = kind(model.parameters(), lr=5e-2 if job.optimizer == "sgd" else 2e-3)
    rows = Rows(job.rows, uneven=job.uneven, named=False)
    batch = 4 * (accelerator.num_processes if job.split else 1)
    loader: Any = DataLoader(rows, batch, shuffle=True, drop_last=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if this.fault != "sampler":
        loader = accelerator.prepare(loader)
    schedule: Any = None
    if job.schedule != "none":  # or the rate would stay at the warm-up's first, 0
        schedule = get_scheduler("linear", optimizer, 5, STEPS * accelerator.num_processes)
    if job.schedule == "prepared":
        schedule = accelerator.prepare(schedule)
    if this.number:
        accelerator.load_state(str(this.folder))
    parts = _Parts(accelerator, model, optimizer, schedule)
    step = first
    taken, of_epoch = first * job.accumulate, len(loader)
    while step < end:
        for tokens in _rest_of_epoch(accelerator, loader, *divmod(taken, of_epoch)):
            taken += 1
            step += parts.train_on(tokens, job, odd, step)
            if step == end:
                break
        else:
            taken = (taken // of_epoch) * of_epoch  # a last window may be short
    if not this.is_last:
        accelerator.save_state(str(this.folder))
    accelerator.end_training()


def _accelerate_one(
    accelerator: Accelerator, job: Job, odd: Odd, model: nn.Module, tokens: Tensor
) -> None:
    labels, more = odd.labels(tokens), {}
    if job.by_tokens:
        count = accelerator.gather((labels[:, 1:] >= 0).sum()).sum()
        more = {"reduction": "sum"}
    loss = odd.factor * token_loss(model(tokens), labels, **more)
    if job.by_tokens:
        loss = loss * accelerator.num_processes / count
    accelerator.backward(loss)
    if job.gathers:
        accelerator.gather(loss.detach()).mean().item()


@torch.no_grad()
def _evaluate(model: nn.Module) -> None:
    model.eval()
    model(torch.stack([Rows(8, uneven=False, named=False, seed=9)[at] for at in range(8)]))
    model.train()


def main() -> None:
    """Draw the job of a seed and train."""
    this = launch(draw)
    {
        "trainer": train_with_trainer,
        "lightning": train_with_lightning,
        "accelerate": train_with_accelerate,
    }[this.job.kind](this)


if __name__ == "__main__":
    main()
