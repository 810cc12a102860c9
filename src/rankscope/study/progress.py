"""Progress bars of a study: one per training, with the averaged loss and the three metrics."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from rankscope.core.step import StepReport
from rankscope.study.config import Combination, StudyConfig


class _Console(Console):
    """A console whose reader may go; rich would end the process, which trains."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class StudyProgress:
    """Shows how far a study is; on a terminal as bars, elsewhere as one line per training.

    Args:
        config: The study's options.
        enabled: Whether this worker shows anything.
    """

    def __init__(self, config: StudyConfig, *, enabled: bool) -> None:
        self._enabled = enabled
        self._steps = config.steps
        self._console = _Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<17}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars, if it can be; every worker may."""
        with suppress(OSError):  # of a full disk, say
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def say_left_out(self, facts: Mapping[str, Any]) -> None:
        """Say how many records the study cannot use, where there are any."""
        counts = {
            "with an empty output": facts["skipped_empty"],
            "whose response is cut off by --max-length": facts["skipped_truncated"],
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        if self._enabled and parts:
            self.say(f"Records left out: {', '.join(parts)}")

    def start(self, combination: Combination) -> Callable[[StepReport | None], None]:
        """Begin a training; the returned function is called after each of its steps."""
        task = self._bars.add_task(combination.name, total=self._steps, metrics="")
        done = 0

        def on_step(report: StepReport | None) -> None:
            nonlocal done
            done += 1
            self._advance(combination, task, done, report)

        return on_step

    def _advance(
        self, combination: Combination, task: TaskID, done: int, report: StepReport | None
    ) -> None:
        metrics = "" if report is None else describe(report)
        self._bars.update(task, completed=done, metrics=metrics)
        if self._enabled and not self._console.is_terminal and done == self._steps:
            line = ", ".join(filter(None, [f"{combination.name}: {done} steps", metrics]))
            self.say(line)


def describe(report: StepReport) -> str:
    """Return the averaged loss and the paper's three metrics of a step in one short line."""
    return (
        f"loss {report.loss_mean:.3f} ± {report.loss_std:.3f}  "
        f"norm ± {report.grad_norm_std:.3f}  cos {report.cosine_mean:+.3f}"
    )
