"""MLflow: metrics in batches, through the client alone."""

import os
import time
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from rankscope.bus.finding import Finding, FindingEvent
from rankscope.sinks.base import NewsSink, RunInfo, SinkError, StepValues, sentence

BATCH = 900  # most values in a request; MLflow takes 1,000
SECONDS = 5.0  # seconds after which the next step sends the kept values

MAX_TAG = 4000


class MlflowSink(NewsSink):
    """Logs to the training's run that is open at its first step, else to a new one.

    The experiment of a new run is by default MLflow's own choice.
    """

    takes_steps = True

    def __init__(self, experiment: str | None = None) -> None:
        super().__init__()
        self._experiment = experiment
        self._client: Any = None
        self._run_id = ""
        self._owns = False
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self._found = mlflow.active_run()  # runs are active per thread: this is the caller's

    def step(self, step: StepValues) -> None:
        """Keep a step, and send the kept values once they are many or old."""
        stamp = round(1000 * step.time)
        values = step.flat().items()
        self._waiting += [Metric(name, value, stamp, step.step) for name, value in values]
        if len(self._waiting) >= BATCH or time.monotonic() - self._sent >= SECONDS:
            self._send()

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Keep a finding that opened, got worse or closed as a tag of the run."""
        self._attach()
        text = sentence(finding, event)[:MAX_TAG]
        self._client.set_tag(self._run_id, f"rankscope.finding.{finding.id}", text)

    def close(self) -> None:
        """Send the rest, and end a run of our own."""
        if self._waiting:
            self._send()
        if self._owns:
            self._client.set_terminated(self._run_id)

    def _send(self) -> None:
        self._attach()
        waiting = self._waiting
        self._waiting = []
        self._sent = time.monotonic()
        for first in range(0, len(waiting), BATCH):
            batch = waiting[first : first + BATCH]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def _attach(self) -> None:
        if self._client is not None:
            return
        try:
            self._client = self._open_run(self.run)
        except MlflowException as error:
            raise SinkError(f"MLflow cannot open a run: {error}") from error

    def _open_run(self, info: RunInfo) -> Any:
        client = MlflowClient()
        self._run_id = self._active_run_id()
        if not self._run_id:
            run = client.create_run(self._experiment_id(client), run_name=info.run_dir.name)
            self._run_id = run.info.run_id
            self._owns = True
        client.set_tag(self._run_id, "rankscope.run_dir", str(info.run_dir))
        return client

    def _active_run_id(self) -> str:
        found = self._found or _active_in_any_thread()
        return os.environ.get("MLFLOW_RUN_ID", "") if found is None else str(found.info.run_id)

    def _experiment_id(self, client: Any) -> str:
        name = self._experiment
        if name is None:
            if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
                return number
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if known is None else known.experiment_id)


def _active_in_any_thread() -> Any:
    """Return the run that the training opened after ``watch``; None if MLflow does not show it."""
    look = getattr(mlflow.tracking.fluent, "_get_latest_active_run", None)
    return None if look is None else look()
