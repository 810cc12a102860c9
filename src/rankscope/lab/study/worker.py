"""A worker of a study: joins the process group and trains under every combination in turn."""

import contextlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.lab.study.config import Combination, Precision, StudyConfig
from rankscope.lab.study.encoding import IGNORED, draw_batches
from rankscope.lab.study.launch import is_echo
from rankscope.lab.study.models import LoadedModel, PreparedModel, load
from rankscope.lab.study.quiet import quiet_transformers, save_checkpoint

_ECHO_SECONDS = 1.0  # of a lost worker's peers, so that the launcher notices that one first

FLUSH_SECONDS = 2.0


def main(
    config: StudyConfig, output: Path, prepared: PreparedModel, todo: Sequence[Combination]
) -> None:
    """Train in a process that the launcher started."""
    device = join_process_group()
    try:
        run_combinations(config, output, prepared, todo, device)
    except Exception as error:
        if is_echo(str(error)):
            time.sleep(_ECHO_SECONDS)
        raise
    finally:
        dist.destroy_process_group()


def run_combinations(
    config: StudyConfig,
    output: Path,
    prepared: PreparedModel,
    todo: Sequence[Combination],
    device: torch.device,
) -> None:
    """Train under each combination in turn; every worker calls it."""
    with StudyProgress(config, enabled=dist.get_rank() == 0) as progress:
        progress.print_left_out(prepared.facts)
        for combination in todo:
            with _deferred_warnings(progress.print_line):
                on_step = progress.start(combination)
                train(config, output, prepared, combination, device, on_step)


@contextlib.contextmanager
def _deferred_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Show the monitor's warnings after a training has ended, and none after it has failed."""
    log = logging.getLogger("rankscope")
    held = BufferingHandler(capacity=1000)
    propagated = log.propagate
    log.propagate = False
    log.addHandler(held)
    try:
        yield
        for warning in held.buffer:
            show(warning.getMessage())
    finally:
        log.removeHandler(held)
        log.propagate = propagated


def join_process_group() -> torch.device:
    """Join the launcher's group, gloo if workers share an accelerator; return the device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_workers = int(os.environ["LOCAL_WORLD_SIZE"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % devices)
    torch.accelerator.set_device_index(device.index)
    own = dist.get_default_backend_for_device(device)
    dist.init_process_group(own if local_workers <= devices else "gloo")
    return device


def train(
    config: StudyConfig,
    output: Path,
    prepared: PreparedModel,
    combination: Combination,
    device: torch.device,
    on_step: Callable[[rankscope.StepReport | None], None],
) -> None:
    """Fine-tune under one combination, watched, and save the model."""
    rank = dist.get_rank()
    _seed_everything(combination.setting.seed_of(rank, config.seed))
    loaded = load(config, prepared.held_out)
    model = loaded.model.to(device)
    _seed_everything(combination.setting.seed_of(rank, config.seed))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        ddp.parameters(), lr=config.effective_learning_rate, weight_decay=0.0
    )
    batches = draw_batches(
        combination,
        num_samples=len(prepared.samples),
        batch_size=config.batch_size,
        rank=rank,
        num_workers=dist.get_world_size(),
        seed=config.seed,
    )
    run_dir = output / "runs" / combination.name
    run_facts = {
        "reading": combination.reading,
        "setting": combination.setting,
        "study": config.to_json(),
        **prepared.facts,
    }
    with rankscope.watch(
        ddp,
        optimizer,
        run_dir=run_dir,
        overhead_budget=None,  # a study wants every step, whatever it costs
        seed=config.seed,
        config=run_facts,
        plan={"loss_weighting": "worker"},  # each worker's mean counts alike, as in the paper
        flush_seconds=FLUSH_SECONDS,
        announce=False,  # the table of all configurations follows
    ) as scope:
        for _ in range(config.steps):
            for micro in range(config.accumulation):
                batch, record_ids = prepared.samples.collate(next(batches))
                batch = {name: each.to(device, non_blocking=True) for name, each in batch.items()}
                scope.batch(record_ids)
                last = micro == config.accumulation - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    losses, tokens = _losses_per_sample(ddp, batch, config.precision)
                    scope.loss(losses, weight=tokens)
                    loss = (losses * tokens).sum() / tokens.sum()
                    (loss / config.accumulation).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            on_step(scope.latest)
        if config.saves(combination):
            _save(loaded, output / "models" / combination.name)


def _losses_per_sample(
    ddp: DistributedDataParallel, batch: dict[str, Tensor], precision: Precision
) -> tuple[Tensor, Tensor]:
    """Return the mean loss per label token of each sample ``[B]``, and its label tokens ``[B]``."""
    device = batch["labels"].device
    with autocast(precision, device):
        logits = ddp(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    present = targets != IGNORED
    token_losses = F.cross_entropy(
        logits[:, :-1][present].float(), targets[present], reduction="none"
    )
    spread = torch.zeros(present.shape, device=device).masked_scatter(present, token_losses)
    tokens = present.sum(1)
    return spread.sum(1) / tokens, tokens


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the mixed-precision context of a precision on a device."""
    on = precision is Precision.BF16 or (precision is Precision.AUTO and device.type != "cpu")
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what training scripts use
    torch.manual_seed(seed)


def _save(loaded: LoadedModel, path: Path) -> None:
    """Save a Hugging Face checkpoint on rank 0, whole or not at all."""
    if dist.get_rank() == 0:
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        with quiet_transformers():
            save_checkpoint(loaded.model, loaded.tokenizer, partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()


class _Console(Console):
    """A console whose reader may go; rich would end the process, which trains."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


_WIDE = 110  # columns of a terminal that has room for bars beside the metrics


class StudyProgress:
    """Shows how far a study is; on a terminal as bars, elsewhere as one line per training."""

    def __init__(self, config: StudyConfig, *, enabled: bool) -> None:
        self._enabled = enabled
        self._steps = config.steps
        self._console = _Console(stderr=True)
        columns: list[ProgressColumn] = [TextColumn("{task.description:<15}"), MofNCompleteColumn()]
        metrics = TextColumn("{task.fields[metrics]}")
        if self._console.width < _WIDE:
            columns += [metrics]
        else:
            columns += [BarColumn(bar_width=16), metrics, TimeRemainingColumn(compact=True)]
        self._bars = Progress(
            *columns,
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def print_line(self, text: str) -> None:
        """Print a line above the bars, if it can be written; every worker may."""
        with contextlib.suppress(OSError):  # such as a full disk
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def print_left_out(self, facts: Mapping[str, Any]) -> None:
        """Print how many records the study cannot use, where there are any."""
        counts = {
            "with an empty output": facts["skipped_empty"],
            "whose response is cut off by --max-length": facts["skipped_truncated"],
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        if self._enabled and parts:
            self.print_line(f"Records left out: {', '.join(parts)}")

    def start(self, combination: Combination) -> Callable[[rankscope.StepReport | None], None]:
        """Begin a training; the returned function is called after each of its steps."""
        task = self._bars.add_task(combination.name, total=self._steps, metrics="")
        done = 0

        def on_step(report: rankscope.StepReport | None) -> None:
            nonlocal done
            done += 1
            metrics = "" if report is None else describe(report)
            self._bars.update(task, completed=done, metrics=metrics)
            if self._enabled and not self._console.is_terminal and done == self._steps:
                words = f"{combination.name}: {done} steps"
                last = "" if report is None else f"; step {report.step}: {metrics}"
                self.print_line(words + last)

        return on_step


def describe(report: rankscope.StepReport) -> str:
    """Return the averaged loss and the paper's three metrics of a step in one short line."""
    return (
        f"loss {report.loss_mean:.3f}, loss std {report.loss_std:.3f}, "
        f"norm std {report.grad_norm_std:.3f}, cosine {report.cosine_mean:+.3f}"
    )
