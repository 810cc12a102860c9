"""Runs a whole study: prepares, launches the workers, and writes the results.

It leaves ``summary.json``, the verdict in Markdown, and a card for each saved model.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from rankscope import RankscopeError, Run, load
from rankscope.bus.numbers import number, whole
from rankscope.bus.words import count
from rankscope.errors import DataError, MissingExtraError, RunError, UsageError
from rankscope.files import parse, read_file, replace, to_plain
from rankscope.lab.study import worker
from rankscope.lab.study.config import Combination, StudyConfig
from rankscope.lab.study.launch import StudyInterrupted, inside_torchrun, launch, stopping_once
from rankscope.lab.study.models import PreparedModel, prepare
from rankscope.lab.study.quiet import quiet_deepspeed
from rankscope.report.markdown import study_markdown
from rankscope.report.study_words import SETTING_WORDS, open_study

STUDY_FILE = "study.json"
PARTS = ("runs", "models", "figures", "report.html", "summary.json", "summary.md", "error.log")
"""The other files of a study in its directory."""

T = TypeVar("T")
Entry = dict[str, Any]  # the part of ``summary.json`` on a training


def run_study(
    config: StudyConfig,
    output: Path,  # the study's directory
    *,
    resume: bool = False,  # continue a study with the same options; finished trainings are kept
    overwrite: bool = False,  # remove a study that is there
) -> list[Entry] | None:
    """Fine-tune under every combination and summarise; the entries of ``summary.json``.

    Starts its own workers on this machine, or is one of them when an outer ``torchrun`` started
    this process; all but rank 0 then return None. StudyInterrupted if a signal came,
    WorkerFailedError if a worker failed.
    """
    quiet_deepspeed()
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("rankscope study", "study") from error
    if resume and overwrite:
        raise UsageError("--resume keeps a study and --overwrite removes it; give one of them")
    run = _run_inside if inside_torchrun() else _run_here
    try:
        with stopping_once():
            return run(config, output, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt as error:
        if inside_torchrun() and os.environ["RANK"] != "0":
            raise SystemExit(130) from error  # rank 0 reports it for all
        raise StudyInterrupted(_how_to_go_on(output)) from error
    except OSError as error:
        raise RunError(
            f"{error.filename or output} cannot be written ({error.strerror or error}); make room, "
            "or choose another --output"
        ) from error


def _run_here(config: StudyConfig, output: Path, *, resume: bool, overwrite: bool) -> list[Entry]:
    """Start the workers on this machine."""
    todo = _check(config, output, resume=resume, overwrite=overwrite)
    if todo:
        _announce(config, todo)
        prepared = prepare(config)
        _begin(config, output, prepared, todo, overwrite=overwrite)
        work = (worker.main, config.workers, config, output, prepared, todo)
        launch(*work, error_log=output / "error.log", preloaded=["rankscope.lab.study.preloaded"])
    return _finish(config, output)


def _run_inside(
    config: StudyConfig, output: Path, *, resume: bool, overwrite: bool
) -> list[Entry] | None:
    """Be one of the workers that an outer ``torchrun`` started."""
    device = worker.join_process_group()
    try:
        first = dist.get_rank() == 0
        if dist.get_world_size() != config.workers:
            problem = (
                f"torchrun started {dist.get_world_size()} ranks, the study has --workers "
                f"{config.workers}; make them equal"
            )
            raise UsageError(problem) if first else SystemExit(2)
        check = partial(_check, config, output, resume=resume, overwrite=overwrite)
        answer = [_fail_together(check, here=first)]
        dist.broadcast_object_list(answer)
        todo = answer[0]
        if todo:
            if first:
                _announce(config, todo)
            prepared = _prepare_on_each_machine(config)
            begin = partial(_begin, config, output, prepared, todo, overwrite=overwrite)
            _fail_together(begin, here=first)
            worker.run_combinations(config, output, prepared, todo, device)
        return _finish(config, output) if first else None
    finally:
        dist.destroy_process_group()


def _announce(config: StudyConfig, todo: Sequence[Combination]) -> None:
    """Print what begins: the first training starts only when data and model are prepared."""
    trainings = count(len(todo), "training")
    worker.StudyProgress(config, enabled=True).print_line(
        f"Preparing data and model, which may take a minute; then {trainings} of "
        f"{count(config.steps, 'step')} on {count(config.workers, 'worker')}."
    )


def _prepare_on_each_machine(config: StudyConfig) -> PreparedModel:
    """Prepare on the first rank of each machine before the others, which find the base cached."""
    early = os.environ["LOCAL_RANK"] == "0"
    first = _fail_together(partial(prepare, config), here=early)
    other = _fail_together(partial(prepare, config), here=not early)
    prepared = first or other
    assert prepared is not None, "every rank has prepared, early or late"
    return prepared


def _fail_together(work: Callable[[], T], *, here: bool) -> T | None:
    """Work where ``here`` is true; when a rank cannot, all ranks end alike."""
    result = None
    problem = ""
    if here:
        try:
            result = work()
        except (RankscopeError, OSError) as error:
            problem = str(error)
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next(filter(None, problems), "")
    if problem and dist.get_rank() == 0:
        raise UsageError(problem)
    if problem:
        raise SystemExit(2)
    return result


def _how_to_go_on(output: Path) -> str:
    if (output / STUDY_FILE).exists():
        return (
            f"Interrupted. What was measured is in {output}; to go on, give the same command "
            "again, with --resume."
        )
    return "Interrupted before the first training; nothing was written."


def _check(
    config: StudyConfig, output: Path, *, resume: bool, overwrite: bool
) -> list[Combination]:
    """Check that the directory may be written; return the trainings that are left to do."""
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    ours = (output / STUDY_FILE).exists()
    if taken and overwrite and not ours:
        raise UsageError(f"{output} is not a study, so it is not overwritten; choose another")
    if taken and not overwrite and not (resume and ours):
        hint = "use --resume or --overwrite" if ours else "choose another directory"
        raise UsageError(f"{output} exists already; {hint}")
    _check_writable(output)
    if not taken or overwrite:
        return list(config.combinations)
    _check_same(config, output)
    return [c for c in config.combinations if not _is_complete(config, output, c)]


def _check_writable(output: Path) -> None:
    folder = output
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise RunError(f"{output} cannot be written ({folder} is a file); choose another --output")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(
            f"{output} cannot be written (no permission to write in {folder}); choose another "
            "--output, or change the permission"
        )


def _check_same(config: StudyConfig, output: Path) -> None:
    before = _read_study(output)["config"]
    now = config.to_json()
    for name in now:
        if now[name] != before.get(name):
            option = "--" + {"readings": "reading"}.get(name, name).replace("_", "-")
            raise UsageError(
                f"--resume needs the options that the study began with: {option} was "
                f"{_shown(before.get(name))} and is {_shown(now[name])}; use --overwrite or "
                "another --output"
            )


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _read_study(output: Path) -> dict[str, Any]:
    try:
        study = parse(read_file(output / STUDY_FILE))
    except ValueError:
        study = None
    if not isinstance(study, dict) or not isinstance(study.get("config"), dict):
        raise DataError(f"{output / STUDY_FILE} is damaged; use --overwrite or another --output")
    return study


def _is_complete(config: StudyConfig, output: Path, combination: Combination) -> bool:
    path = output / "runs" / combination.name
    if not Run.is_run(path):
        return False
    run = Run.open(path)
    saved = not config.saves(combination) or (output / "models" / combination.name).is_dir()
    return run.status == "complete" and run.info.get("steps") == config.steps and saved


def _begin(
    config: StudyConfig,
    output: Path,
    prepared: PreparedModel,
    todo: Sequence[Combination],
    *,
    overwrite: bool,
) -> None:
    """Write the study's options and facts, and remove the rest of unfinished trainings."""
    if overwrite:
        for name in PARTS:
            _remove(output / name)
    elif (output / STUDY_FILE).exists():
        _check_same_data(prepared, output)
    (output / "models").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"config": config.to_json(), **prepared.facts}, indent=2)
    replace(output / STUDY_FILE, f"{text}\n".encode())
    for combination in todo:
        _remove(output / "runs" / combination.name)
    for partial_model in (output / "models").glob(".*.partial-*"):
        _remove(partial_model)
    _remove(output / "error.log")


def _check_same_data(prepared: PreparedModel, output: Path) -> None:
    before = _read_study(output)
    for name, what in {"data_digest": "data", "num_parameters": "model"}.items():
        if prepared.facts[name] != before.get(name):
            raise UsageError(
                f"--resume needs the {what} that the study began with, and its content has "
                "changed since; use --overwrite or another --output"
            )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _finish(config: StudyConfig, output: Path) -> list[Entry]:
    entries = []
    for combination in config.combinations:
        entry = summarize_run(output, combination, config)
        if config.saves(combination):
            write_model_card(output / "models" / combination.name, entry, config)
        entries.append(entry)
    write_summary(output, entries)
    return entries


def summarize_run(output: Path, combination: Combination, config: StudyConfig) -> Entry:
    """Return the ``summary.json`` entry of one finished training."""
    path = output / "runs" / combination.name
    run = load(path)
    assessment = run.assess()
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
        "steps": run.steps.num_rows,
        "run": path.relative_to(output).as_posix(),
    }


def write_summary(output: Path, entries: Sequence[Entry]) -> None:
    """Write ``summary.json``, and the study's verdict as ``summary.md``."""
    text = json.dumps(list(entries), indent=2, allow_nan=False) + "\n"
    replace(output / "summary.json", text.encode())
    replace(output / "summary.md", study_markdown(open_study(output)).encode())


def write_model_card(path: Path, entry: Entry, config: StudyConfig) -> None:
    """Write the ``README.md`` of a saved checkpoint."""
    samples = f"{whole(entry['distinct_samples'])} of {whole(entry['samples_drawn'])}"
    text = f"""---
library_name: transformers
tags: [rankscope, data-parallel]
---

# {entry["model"]}, fine-tuned under {entry["setting"].upper()}, {entry["reading"]}

Full-parameter fine-tuning by `rankscope study`, the experiment of arXiv 2602.14462.

| | |
|---|---|
| Setting | {entry["setting"].upper()}: {SETTING_WORDS[entry["setting"]]} |
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
| Averaged loss, first 5 → last 5 steps | {number(entry["loss_first"])} → \
{number(entry["loss_last"])} |

**{entry["headline"]}** {entry["recommendation"]}
"""
    replace(path / "README.md", text.encode())
