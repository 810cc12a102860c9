import json
import math
import os
import struct
import subprocess
import sys
import time
from functools import partial

import pytest

from rankscope.bus.finding import Severity
from rankscope.sinks.base import step_values
from rankscope.sinks.hub import Feeder
from record.step_reports import make_report
from sinks.findings import FINDING, finding, run_info

STEPS = [step_values(make_report(step), (1,), {Severity.ERROR: 2}) for step in range(4)]
CLOSED = finding(status="closed", step=7)
TEXTS = ["warning: data.duplicate_batches opened", "warning: data.duplicate_batches closed"]


def feed(sink, info):
    sink.open(info)
    for step in STEPS[:2]:
        sink.step(step)
    for event in (FINDING, FINDING, CLOSED):
        sink.finding(event)
    for step in STEPS[2:]:
        sink.step(step)
    sink.close()


def expected(point):
    points = {}
    for step in STEPS:
        for name, value in step.flat().items():
            points.setdefault(name, []).append(point(step, value))
    return points


def single(value):
    """Return a number as TensorBoard keeps it, in 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def test_tensorboard_reads_the_same_scalars_and_the_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rankscope.sinks.tensorboard import TensorBoardSink

    began = time.time()
    feed(TensorBoardSink(), run_info(tmp_path))
    ended = time.time()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    read = {n: [(e.step, e.wall_time, e.value) for e in own] for n, own in scalars.items()}
    assert read == expected(lambda step, value: (step.step, step.time, single(value)))
    assert any(len(points) < 4 for points in read.values())  # what is undefined is left out
    assert "rankscope_ranks/grad_norm/1" in read
    texts = [t.tensor_proto.string_val[0].decode() for t in events.Tensors("rankscope/findings")]
    assert [text.partition(" on ")[0] for text in texts] == TEXTS
    assert [event.step for event in events.Tensors("rankscope/findings")] == [5, 7]
    assert all(began <= t.wall_time <= ended for t in events.Tensors("rankscope/findings"))


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Weights & Biases without network, questions, or anything outside of a directory."""
    with pytest.MonkeyPatch.context() as patch:
        home = str(tmp_path_factory.mktemp("wandb"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("WANDB_DIR", raising=False)
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, home)
        import wandb

        from rankscope.sinks.wandb import WandbSink
        from sinks import wandb_files

        yield wandb, WandbSink, wandb_files
        wandb.teardown()


def test_wandb_has_a_row_per_step_in_a_run_of_its_own(tmp_path, offline):
    wandb, WandbSink, wandb_files = offline
    feed(WandbSink("a-project"), run_info(tmp_path))
    assert wandb.run is None
    rows = wandb_files.history(tmp_path / "run")
    assert rows == [{"rankscope/step": step.step, **step.flat()} for step in STEPS]
    [run] = [r.run for r in wandb_files.records(tmp_path / "run") if r.HasField("run")][:1]
    assert (run.project, run.display_name, run.job_type) == ("a-project", "run", "rankscope")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["name"] == "a run"
    assert config["rankscope"] == {"tier": "sketch", "run_dir": str(tmp_path / "run")}
    [(title, text, level)] = wandb_files.alerts(tmp_path / "run")
    assert (title, level) == ("rankscope: data.duplicate_batches", "WARN")
    assert text.startswith(TEXTS[0])
    kept = wandb_files.summary(tmp_path / "run")[f"rankscope/finding/{FINDING.id}"]
    assert kept.startswith(TEXTS[1])


def test_wandb_adds_to_the_rows_of_the_training_and_makes_none(tmp_path, offline):
    wandb, WandbSink, wandb_files = offline
    sink = WandbSink()
    sink.open(run_info(tmp_path))
    run = wandb.init(project="theirs", dir=str(tmp_path))
    for step in STEPS:
        sink.step(step)
        if step.step != 1:
            run.log({"train/loss": 0.5})
    run.finish()
    sink.step(STEPS[0])
    sink.finding(FINDING)
    sink.close()
    rows = wandb_files.history(tmp_path)
    assert [row.pop("train/loss") for row in rows] == [0.5] * 3
    steps = [{"rankscope/step": step.step, **step.flat()} for step in STEPS]
    first, second = steps[0], steps[1] | steps[2]
    assert wandb_files.summary(tmp_path)["rankscope/run_dir"] == str(tmp_path / "run")
    assert rows == [first, second, steps[3]]


def test_wandb_finishes_its_run_while_another_process_still_holds_the_pipe(tmp_path, offline):
    _, WandbSink, wandb_files = offline
    sink = WandbSink()
    feeder = Feeder("wandb", sink, run_info(tmp_path))
    feeder.step(STEPS[0])
    held = hold_when_open(sink)
    try:
        feeder.finish()
        assert feeder.join(60)
        assert sink._run._process.returncode == 0
    finally:
        os.close(held)
    assert len(wandb_files.history(tmp_path / "run")) == 1


def hold_when_open(sink, seconds=60):
    """Hold the pipe to W&B's process open, as a data loader's worker that is forked then does."""
    deadline = time.monotonic() + seconds
    while sink._run is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return os.dup(sink._run._process.stdin.fileno())


@pytest.fixture
def client(tmp_path, monkeypatch):
    """MLflow on files of its own: its light package has no other store without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    from mlflow import MlflowClient

    return MlflowClient()


def metrics(client, run):
    history = partial(client.get_metric_history, run.info.run_id)
    return {n: [(p.step, p.timestamp, p.value) for p in history(n)] for n in run.data.metrics}


def test_mlflow_has_all_points_in_a_run_of_its_own(tmp_path, client):
    from rankscope.sinks.mlflow import MlflowSink

    feed(MlflowSink("an-experiment"), run_info(tmp_path))
    [run] = client.search_runs([client.get_experiment_by_name("an-experiment").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    read = metrics(client, run)
    assert read == expected(lambda step, value: (step.step, round(1000 * step.time), value))
    assert all(math.isfinite(point[2]) for points in read.values() for point in points)
    assert run.data.tags[f"rankscope.finding.{FINDING.id}"].startswith(TEXTS[1])
    assert run.data.tags["rankscope.run_dir"] == str(tmp_path / "run")


def test_mlflow_joins_the_run_of_the_training_and_leaves_it_open(tmp_path, client):
    import threading

    import mlflow

    from rankscope.sinks.mlflow import MlflowSink

    mlflow.set_experiment("theirs")
    sink = MlflowSink()
    with mlflow.start_run() as run:  # after watch, and in another thread than the sink's
        thread = threading.Thread(target=feed, args=(sink, run_info(tmp_path)))
        thread.start()
        thread.join()
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("train/loss", 0.5)
    read = metrics(client, client.get_run(run.info.run_id))
    assert read.pop("train/loss")[0][2] == 0.5
    assert read == expected(lambda step, value: (step.step, round(1000 * step.time), value))
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_trackio_has_a_row_per_step_and_alerts_in_a_run_of_its_own(tmp_path):
    """In another process, as Trackio reads its directory once; in a thread, as sinks are."""
    script = """
import json, sys
from pathlib import Path
from threading import Thread
from trackio.sqlite_storage import SQLiteStorage
import trackio
from rankscope.sinks.trackio import TrackioSink
from sinks.findings import run_info
from sinks.test_trackers import feed

theirs = trackio.init("a-project", name="theirs", auto_log_cpu=False, auto_log_gpu=False)
theirs.log({"loss": 1.0})
folder = Path(sys.argv[1])
sink = Thread(target=lambda: feed(TrackioSink("a-project"), run_info(folder)))
sink.start()
sink.join()
theirs.log({"loss": 2.0})
theirs.finish()
read = {
    "rows": SQLiteStorage.get_logs("a-project", "run"),
    "theirs": SQLiteStorage.get_logs("a-project", "theirs"),
    "alerts": SQLiteStorage.get_alerts("a-project", "run"),
    "config": SQLiteStorage.get_run_config("a-project", "run"),
}
(folder / "read.json").write_text(json.dumps(read, default=str))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TRACKIO_DIR"] = str(tmp_path / "trackio")
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, capture_output=True, env=environment, check=True)
    read = json.loads((tmp_path / "read.json").read_text())
    assert [row.pop("step") for row in read["rows"]] == [step.step for step in STEPS]
    values = [{k: v for k, v in row.items() if k.startswith("rankscope")} for row in read["rows"]]
    assert values == [step.flat() for step in STEPS]
    assert [(row["step"], row["loss"]) for row in read["theirs"]] == [(0, 1.0), (1, 2.0)]
    [alert] = read["alerts"]
    assert (alert["title"], alert["level"]) == ("rankscope: data.duplicate_batches", "warn")
    assert alert["text"].startswith(TEXTS[0])
    assert read["config"]["run_dir"] == str(tmp_path / "run")
    assert read["config"]["name"] == "a run"
