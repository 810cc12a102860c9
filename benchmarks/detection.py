"""The detection bench: false alarms, delays, the rules of others, and real training jobs.

Run ``python benchmarks/detection.py --parts null,faults,rules,training``; it writes
``docs/detection.md`` from all results that were ever saved beside it, the latest of each part.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import detection_faults as faults
import detection_null as null
import detection_outside as outside
import detection_rules as rules
from detection_pages import render
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "detection.md"
QUICK = 0.1
Results = dict[str, Any]


def bench_null(options: argparse.Namespace) -> Results:
    """Count false alarms."""
    return {
        "healthy": null.measure_healthy(options.scale),
        "rare": null.measure_rare(options.scale),
        "outside": null.measure_outside(options.scale),
        "says": outside.measure(options.scale),
        "whole": faults.measure_healthy(int(20_000 * options.scale)),
    }


def bench_faults(options: argparse.Namespace) -> Results:
    """Measure delays."""
    return {"rows": [faults.measure(fault, options.scale) for fault in faults.FAULTS]}


def bench_rules(options: argparse.Namespace) -> Results:
    """Measure the rules of others."""
    return {"rows": rules.measure()}


def bench_training(options: argparse.Namespace) -> Results:
    """Train, and see what is said of it."""
    import detection_jobs as jobs
    import detection_training as training

    steps = 60 if options.quick else training.STEPS
    with tempfile.TemporaryDirectory() as folder:
        directory = options.runs or Path(folder)
        training.train_all(directory, jobs.TRAININGS, steps)
        rows = [training.judge(directory, job) for job in jobs.TRAININGS]
    return {"rows": rows}


PARTS: dict[str, Callable[[argparse.Namespace], Results]] = {
    "null": bench_null,
    "faults": bench_faults,
    "rules": bench_rules,
    "training": bench_training,
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="part of the repetitions")
    parser.add_argument("--quick", action="store_true", help="--scale 0.1, and short trainings")
    parser.add_argument("--runs", type=Path, help="keep the training jobs' runs in this directory")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.quick:
        options.scale = QUICK
    file = options.output.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in options.parts.split(","):
        results[part] = PARTS[part](options)
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        options.output.write_text(render(results), encoding="utf-8")
    Console().print(render(results), markup=False)


if __name__ == "__main__":
    main()
