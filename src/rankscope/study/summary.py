"""What a study leaves behind: ``summary.json``, the table, and a card for each saved model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.core.signals import Table
from rankscope.diagnose.assessment import assess
from rankscope.record import Run
from rankscope.record.files import replace, to_plain
from rankscope.study.config import Combination, StudyConfig
from rankscope.web.markdown import study_markdown
from rankscope.web.study_words import open_study
from rankscope.web.words import number, whole

Entry = dict[str, Any]


def summarize_run(output: Path, combination: Combination, config: StudyConfig) -> Entry:
    """Return the ``summary.json`` entry of one finished training."""
    path = output / "runs" / combination.name
    run = Run.open(path)
    assessment = assess(run)
    facts = run.info["config"]
    return {
        "setting": str(combination.setting),
        "reading": str(combination.reading),
        **to_plain(assessment.values),
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "learning_rate": config.effective_learning_rate,
        "severity": None if assessment.severity is None else str(assessment.severity),
        "headline": assessment.headline,
        "statements": list(assessment.statements),
        "recommendation": assessment.recommendation,
        "model": facts["model"],
        "data": facts["data"],
        "steps": run.table(Table.STEPS).num_rows,
        "run": path.relative_to(output).as_posix(),
    }


def write_summary(output: Path, entries: Sequence[Entry]) -> None:
    """Write ``summary.json``, and the study's verdict as ``summary.md``."""
    text = json.dumps(list(entries), indent=2, allow_nan=False) + "\n"
    replace(output / "summary.json", text.encode())
    replace(output / "summary.md", study_markdown(open_study(output)).encode())


def write_model_card(path: Path, entry: Entry, config: StudyConfig) -> None:
    """Write the ``README.md`` of a saved checkpoint."""
    seeds = {
        "s1-1": "all workers share the seed",
        "s1-2": "worker 0 has another seed than the others",
        "s1-3": "every worker has its own seed",
    }[entry["setting"]]
    samples = f"{whole(entry['distinct_samples'])} of {whole(entry['samples_drawn'])}"
    text = f"""---
library_name: transformers
tags: [rankscope, data-parallel]
---

# {entry["model"]}, fine-tuned under {entry["setting"].upper()}, {entry["reading"]}

Full-parameter fine-tuning by `rankscope study`, the experiment of arXiv 2602.14462.

| | |
|---|---|
| Setting | {entry["setting"].upper()}: {seeds} |
| Reading | {entry["reading"]} |
| Base | {entry["model"]} |
| Data | {entry["data"]} |
| Workers × micro-batches × batch | {entry["num_workers"]} × {config.accumulation} × \
{config.batch_size} |
| Optimizer steps | {entry["steps"]} |
| Optimizer | AdamW, learning rate {entry["learning_rate"]:g}, no weight decay, constant |
| Precision | {config.precision} |
| Longest sample | {config.max_length} tokens, loss on the response only |
| Seed | {config.seed} |

## Measured before the all-reduce

| | mean over steps |
|---|---|
| Loss dispersion (std over workers) | {number(entry["loss_std"])} |
| Loss range over workers | {number(entry["loss_range"])} |
| Gradient-norm dispersion | {number(entry["grad_norm_std"])} |
| Gradient-direction consistency (mean cosine) | {number(entry["cosine_mean"])} |
| Distinct samples of those drawn | {samples} |
| Averaged loss, first → last steps | {number(entry["loss_first"])} → \
{number(entry["loss_last"])} |

**{entry["headline"]}** {entry["recommendation"]}
"""
    replace(path / "README.md", text.encode())
