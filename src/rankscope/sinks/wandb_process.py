"""A run of Weights & Biases in a process of its own: a script without imports from rankscope.

W&B delays the exit of its process until the upload ends; the training must not wait for that.
This process reads one JSON object per line: first the arguments of ``wandb.init``,
then ``{"log": …}`` or ``{"id": …, "text": …, "title": …, "level": …}``. It finishes the run after
``{"end": true}``, or at the end of its input. It answers one line, ``{"problem": …}``: empty once
the run is open.
"""

import json
import os
import sys
from typing import Any

import wandb


def main() -> None:
    """Read lines until the end marker, or the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # W&B's own output is no answer
    problem = ""
    run = None
    try:
        settings = wandb.Settings(console="off")
        run = wandb.init(settings=settings, **json.loads(sys.stdin.readline()))
    except Exception as error:
        problem = str(error) or type(error).__name__
    answers.write(json.dumps({"problem": problem}) + "\n")
    answers.close()
    if run is None:
        return
    define_axes(run)
    for message in map(json.loads, sys.stdin):
        if "end" in message:
            break
        take(run, message)
    run.finish()


def define_axes(run: Any) -> None:
    """Make the step the x axis of all curves of rankscope."""
    run.define_metric("rankscope/step", hidden=True)
    for family in ("rankscope", "rankscope_workers", "rankscope_ranks"):
        run.define_metric(f"{family}/*", step_metric="rankscope/step")


def take(run: Any, message: dict[str, Any]) -> None:
    """Log one line."""
    if "log" in message:
        run.log(message["log"])
        return
    run.summary[f"rankscope/finding/{message['id']}"] = message["text"]
    if message["level"]:
        run.alert(title=message["title"], text=message["text"], level=message["level"])


if __name__ == "__main__":
    main()
