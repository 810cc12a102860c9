"""Real training jobs of the study's tiny model on 8 gloo ranks, watched and then judged.

Run ``python benchmarks/detection_training.py DIRECTORY`` to train and judge; runs that are there
already are judged again, not trained again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import detection_jobs as jobs
import numpy as np
import torch
import torch.distributed as dist
from detection_jobs import Setup, Training
from harness import run_ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Finding, Severity
from rankscope.lab.study.config import StudyConfig
from rankscope.lab.study.data import load_records
from rankscope.lab.study.encoding import IGNORED
from rankscope.lab.study.models import PreparedModel, load, prepare
from rankscope.record import Run
from rankscope.verdict.diagnosis import Diagnosis, hosts_of

Row = dict[str, Any]
LEARNING_RATE = 5e-4
MAX_LENGTH = 96
STEPS = 300


def train_all(directory: Path, trainings: tuple[Training, ...], steps: int) -> None:
    """Train what is not there yet, all in one set of processes."""
    todo = [t.name for t in trainings if not (directory / t.name / "run.json").exists()]
    if not todo:
        return
    prepared = prepare(StudyConfig(max_length=MAX_LENGTH))
    run_ranks(_train_on_rank, jobs.WORKERS, str(directory), todo, steps, prepared)


def _train_on_rank(directory: str, names: list[str], steps: int, prepared: PreparedModel) -> None:
    samples = prepared.samples
    kinds = _kinds(samples.indices)
    for training in jobs.TRAININGS:
        if training.name in names:
            started = time.monotonic()
            torch.manual_seed(dist.get_rank())
            model = load(StudyConfig(), prepared.held_out).model
            vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
            setup = Setup(samples, dist.get_rank(), vocab_size, kinds)
            _train(Path(directory) / training.name, training, setup, model, steps)
            if dist.get_rank() == 0:
                print(f"{training.name}: {time.monotonic() - started:.0f} s", flush=True)


def _train(
    run_dir: Path, training: Training, setup: Setup, model: torch.nn.Module, steps: int
) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    if training.prepare is not None and setup.rank == training.faulty:
        training.prepare(ddp, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    batches = training.draw(setup)
    with rankscope.watch(ddp, optimizer, run_dir=run_dir, overhead_budget=None) as scope:
        for step in range(steps):
            if training.warm_up:
                optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / training.warm_up)
            batch, ids = setup.samples.collate(next(batches))
            if training.alter is not None and training.faulty in (None, setup.rank):
                batch = training.alter(setup, batch, step) if step >= training.start else batch
            if setup.rank == 3:
                time.sleep(training.sleep)
            scope.batch(ids)
            _step(ddp, optimizer, batch, scope)


def _step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batch: jobs.Batch,
    scope: rankscope.Scope,
) -> None:
    logits = ddp(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    present = targets != IGNORED
    token_losses = F.cross_entropy(logits[:, :-1][present], targets[present], reduction="none")
    spread = torch.zeros(present.shape).masked_scatter(present, token_losses)
    tokens = present.sum(1)
    losses = spread.sum(1) / tokens
    scope.loss(losses.detach(), weight=tokens)
    ((losses * tokens).sum() / tokens.sum()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _kinds(indices: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the kind of each record's task: records whose instructions begin alike."""
    records = {record.index: record for record in load_records("builtin").records}
    begins = [records[index].instruction.split()[0] for index in indices.tolist()]
    return np.unique(begins, return_inverse=True)[1].astype(np.int64)


def judge(directory: Path, training: Training) -> Row:
    """Diagnose a run from its record, as ``rankscope report`` does, and keep what it says."""
    run = Run.open(directory / training.name)
    diagnosis = Diagnosis(RunFacts(run.num_workers, hosts_of(run.info)))
    events: list[Finding] = []
    steps = 0
    for steps, report in enumerate(run.iter_reports(), start=1):  # noqa: B007
        events += diagnosis.observe(report)
    events += diagnosis.close()
    alarms = [event for event in events if event.severity >= Severity.WARNING]
    return {
        "name": training.name,
        "words": training.words,
        "faulty": training.faulty,
        "start": training.start,
        "steps": steps,
        "alarms": [_short(event) for event in _first_of_each(alarms)],
        "last": [_short(finding) for finding in diagnosis.findings],
    }


def _first_of_each(events: list[Finding]) -> list[Finding]:
    firsts: dict[str, Finding] = {}
    for event in events:
        firsts.setdefault(event.id, event)
    return list(firsts.values())


def _short(finding: Finding) -> Row:
    names = ("cause", "severity", "status", "ranks", "step", "first_step", "explanation")
    event = finding.to_json()
    return {name: event[name] for name in names}


def main() -> None:
    """Train, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--names", default="")
    options = parser.parse_args()
    names = options.names.split(",") if options.names else [t.name for t in jobs.TRAININGS]
    trainings = tuple(t for t in jobs.TRAININGS if t.name in names)
    train_all(options.directory, trainings, options.steps)
    for training in trainings:
        print(json.dumps(judge(options.directory, training), indent=1))


if __name__ == "__main__":
    main()
