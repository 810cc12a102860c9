"""What a study leaves behind: ``summary.json``, the table, and a card for each saved model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.core.signals import Table
from rankscope.diagnose.assessment import assess
from rankscope.record import Run
from rankscope.study.config import Combination, StudyConfig

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
        **{name: _finite(value) for name, value in assessment.values.items()},
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
    """Write ``summary.json`` and ``summary.md``."""
    write_whole(
        output / "summary.json", json.dumps(list(entries), indent=2, allow_nan=False) + "\n"
    )
    write_whole(output / "summary.md", markdown_table(entries))


def markdown_table(entries: Sequence[Entry]) -> str:
    """Return the study's table in Markdown, one row per training."""
    lines = [
        "| reading | setting | loss std | expected | loss range | grad-norm std | mean cosine "
        "| distinct of drawn | loss first → last | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(entry) for entry in entries]
    return "\n".join(lines) + "\n"


def write_model_card(path: Path, entry: Entry, config: StudyConfig) -> None:
    """Write the ``README.md`` of a saved checkpoint."""
    seeds = {
        "s1-1": "all workers share the seed",
        "s1-2": "worker 0 has another seed than the others",
        "s1-3": "every worker has its own seed",
    }[entry["setting"]]
    samples = f"{_count(entry['distinct_samples'])} of {_count(entry['samples_drawn'])}"
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
| Loss dispersion (std over workers) | {_number(entry["loss_std"])} |
| Loss range over workers | {_number(entry["loss_range"])} |
| Gradient-norm dispersion | {_number(entry["grad_norm_std"])} |
| Gradient-direction consistency (mean cosine) | {_number(entry["cosine_mean"])} |
| Distinct samples of those drawn | {samples} |
| Averaged loss, first → last steps | {_number(entry["loss_first"])} → \
{_number(entry["loss_last"])} |

**{entry["headline"]}** {entry["recommendation"]}
"""
    write_whole(path / "README.md", text)


def _row(entry: Entry) -> str:
    samples = f"{_count(entry['distinct_samples'])} / {_count(entry['samples_drawn'])}"
    cells = [
        entry["reading"],
        entry["setting"].upper(),
        *(
            _number(entry[name])
            for name in (
                "loss_std",
                "loss_std_expected",
                "loss_range",
                "grad_norm_std",
                "cosine_mean",
            )
        ),
        samples,
        f"{_number(entry['loss_first'])} → {_number(entry['loss_last'])}",
        entry["severity"] or "healthy",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
