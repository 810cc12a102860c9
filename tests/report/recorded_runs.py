"""Runs and studies on disk, of simulated trainings in which samples decide losses and gradients."""

import functools
import json
from dataclasses import replace

import numpy as np

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.step import GatheredStep
from rankscope.record import Run, RunWriter
from rankscope.verdict.assessment import assess
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import events_of
from support.streams import worker_columns

BATCH = 4
DATASET = 6000
WIDTH = 257


def sampler(reading, setting, num_workers):
    """Return what draws a rank's samples of a step under a reading and a setting of the study."""
    odd = [1] + [0] * (num_workers - 1)
    seeds = {"s1-1": [0] * num_workers, "s1-2": odd, "s1-3": range(num_workers)}[setting]
    orders = [np.random.default_rng(seed).permutation(DATASET) for seed in seeds]

    def draw(step, rank):
        own = orders[rank][rank::num_workers] if reading == "sharded" else orders[rank]
        at = (step * BATCH + np.arange(BATCH)) % len(own)
        return own[at].astype(np.int64)

    return draw


@functools.cache
def data_set():
    """Return how far each sample's loss is off, and each sample's gradient."""
    table = np.random.default_rng(7)
    return table.normal(0, 0.5, DATASET), table.normal(0, 1, (DATASET, WIDTH)) + 0.2


def gathered(step, batches, num_steps):
    num_workers = len(batches)
    offsets, gradients = data_set()
    sketches_WK = np.array([gradients[batch].mean(axis=0) for batch in batches], np.float32)
    base = 1.1 + 1.9 * np.exp(-4 * step / max(num_steps, 1))
    return GatheredStep(
        step=step,
        time=1.7e9 + 0.4 * step,
        observed=True,
        workers=worker_columns(
            num_workers,
            loss=[base + offsets[batch].mean() for batch in batches],
            loss_weight=[40.0 * BATCH] * num_workers,
            loss_sem=[offsets[batch].std(ddof=1) / np.sqrt(len(batch)) for batch in batches],
            grad_norm=np.linalg.norm(sketches_WK, axis=1),
            num_samples=[len(batch) for batch in batches],
            step_seconds=[0.4] * num_workers,
            overhead_seconds=[0.004] * num_workers,
        ),
        sketches_WK=sketches_WK,
        samples=tuple(batches),
    )


def changing(change):
    """Return what changes copies of a step's columns in place; ``change`` may return more."""

    def changed(step):
        workers = {name: values.copy() for name, values in step.workers.items()}
        return replace(step, workers=workers, **(change(step, workers) or {}))

    return changed


ODD = 2
"""The rank that :func:`with_everything` makes different, in the second of its groups."""


@changing
def with_everything(step, workers):
    """Give a step groups, audits, times, from step 10 on an odd worker, from 20 on an interval."""
    random = np.random.default_rng(step.step)
    num_workers = step.num_workers
    workers["step_seconds"] = random.uniform(0.4, 0.5, num_workers)
    late = step.step >= 10
    workers["loss"][ODD] += 5.0 * late
    workers["grad_norm"][ODD] *= 1 + 3 * late
    workers["rollout_gap"][:] = 0.01 + 1e-4 * step.step
    workers["rollout_gap"][ODD] *= 1 + 3 * late
    interval = 1 if step.step < 20 else 2
    if step.step % interval:
        workers["grad_norm"][:] = np.nan
        return {"observed": False, "sketches_WK": None, "interval": interval}
    norms_WG = random.uniform(0.9, 1.1, (num_workers, 3))
    norms_WG[ODD, 1] *= 2
    residuals_WG = np.full((num_workers, 3), 3e-7)
    audited = step.step % 4 == 0
    return {
        "interval": interval,
        "groups": ("embed", "layers.0", "head"),
        "group_norms_WG": norms_WG,
        "group_sketches_WGK": random.normal(0.5, 1, (num_workers, 3, 61)).astype(np.float32),
        "residuals_WG": residuals_WG if audited else None,
        "total_residuals_W": residuals_WG.mean(axis=1) if audited else None,
    }


def record_run(
    path,
    *,
    reading="sharded",
    setting="s1-1",
    num_workers=8,
    num_steps=30,
    change=lambda step: step,
    status="complete",
    **info,
):
    """Record a simulated run, and open it; one that is ``running`` is not closed."""
    facts = {"model": "tiny (built-in base)", "data": "simulated", "num_workers": num_workers}
    writer = RunWriter(path, {**facts, **info})
    diagnosis = Diagnosis(RunFacts(num_workers))
    draw = sampler(reading, setting, num_workers)
    reports = []
    for step in range(num_steps):
        batches = [draw(step, rank) for rank in range(num_workers)]
        reports.append(summarize(change(gathered(step, batches, num_steps))))
    writer.add_many(reports)
    writer.add_findings(events_of(diagnosis, reports))
    writer.add_findings(diagnosis.close())
    writer.flush()
    if status != "running":
        writer.close(status)
    return Run.open(path)


def record_study(path, *, readings=("replicated", "sharded"), num_steps=30, **info):
    entries = []
    for reading in readings:
        for setting in ("s1-1", "s1-2", "s1-3"):
            place = f"runs/{reading}-{setting}"
            own = {"reading": reading, "setting": setting}
            run = record_run(path / place, **own, num_steps=num_steps, **info)
            verdict = assess(run)
            entries.append(
                {
                    **verdict.values,
                    **own,
                    "batch_size": BATCH,
                    "severity": None if verdict.severity is None else str(verdict.severity),
                    "headline": verdict.headline,
                    "statements": list(verdict.statements),
                    "recommendation": verdict.recommendation,
                    "model": "tiny (built-in base)",
                    "data": "simulated",
                    "run": place,
                    **info,
                }
            )
    (path / "summary.json").write_text(json.dumps(entries))
    (path / "study.json").write_text(json.dumps({"steps": num_steps}))
    return path
