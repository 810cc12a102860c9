import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest
from typer.testing import CliRunner

import rankscope
from rankscope.bus.evidence import Table
from rankscope.cli.main import app
from rankscope.errors import UsageError
from rankscope.record import Run
from rankscope.record.stores import Mirror, Store, at_hand
from support.accidents import wait_until
from support.loops import Loop
from support.ranks import run_ranks

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def s3_server(monkeypatch) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    apart = Path(sys.prefix) / "s3"  # what it needs is at odds with other packages
    environment = {**os.environ, "PYTHONPATH": str(apart)}
    server = Popen(command, env=environment, stdout=DEVNULL, stderr=DEVNULL)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        for _ in range(600):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        files, _ = Store.of("s3://bucket/runs?allow_bucket_creation=true").open()
        files.create_dir("bucket")
        yield
    finally:
        server.kill()
        server.wait()


def train(rank: int, place: str, environment: dict[str, str]) -> list[str]:
    os.environ.update(environment)  # ranks come from a process that was started before
    loop = Loop(rank, place, agent="process")
    for step in range(NUM_STEPS):
        loop.step(step)
    loop.close()
    return loop.warnings


def chosen() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith("AWS_") or k == "XDG_CACHE_HOME"}


def contents(run: Run) -> dict[Table, list[dict]]:
    return {
        table: [
            {name: value for name, value in row.items() if "time" not in name and "sec" not in name}
            for row in run.table(table).to_pylist()
        ]
        for table in (Table.STEPS, Table.WORKERS, Table.PAIRS, Table.SAMPLES)
    }


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_in_an_s3_bucket_is_recorded_read_and_continued(tmp_path, monkeypatch):
    with s3_server(monkeypatch):
        assert run_ranks(train, 2, "s3://bucket/runs/sft", chosen()) == [[], []]
        here = Run.open(Store.of("s3://bucket/runs/sft").copy)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
        warnings, _ = run_ranks(train, 2, "s3://bucket/runs/sft", chosen())
        assert warnings == [
            "s3://bucket/runs/sft already holds a run; this one is recorded in "
            "s3://bucket/runs/sft-2, after it; another run directory keeps the two apart"
        ]
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a reader's"))
        assert rankscope.load("s3://bucket/runs/sft").info["status"] == "complete"
        assert contents(here) == contents(Run.open(at_hand("s3://bucket/runs/sft")))
        second = Run.open(at_hand("s3://bucket/runs/sft-2"))
        assert (second.info["continues"], second.info["first_step"]) == ("sft", NUM_STEPS)
        monkeypatch.chdir(tmp_path)
        told = CliRunner().invoke(app, ["report", "s3://bucket/runs", "--json"])
        names = {Path(run["path"]).name for run in json.loads(told.stdout)["runs"]}
        assert names == {"sft", "sft-2"}
        CliRunner().invoke(app, ["report", "s3://bucket/runs/sft-2"])
        assert (tmp_path / "report.html").exists()


def file_store(folder: Path) -> Store:
    store = Store.of(f"file://{folder}")
    assert store is not None
    return store


def write_run(folder: Path, status: str = "complete") -> None:
    for name in ("steps", "rollups/64"):
        (folder / name).mkdir(parents=True)
        (folder / name / "part-000000.parquet").write_bytes(b"steps")
    (folder / "run.json").write_text(json.dumps({"status": status, "schema_version": 1}))
    (folder / ".writer").write_text("hidden")


def sent_to(shelf: Path) -> set[str]:
    return {str(path.relative_to(shelf)) for path in shelf.rglob("*") if path.is_file()}


def test_what_a_store_refuses_is_sent_later(tmp_path, caplog):
    shelf = tmp_path / "shelf"
    shelf.write_text("a file where a directory should be")
    store = file_store(shelf / "sft")
    write_run(store.copy)
    mirror = Mirror(store.copy, store, interval=0.05)
    wait_until(lambda: caplog.messages)
    (warning,) = caplog.messages
    assert str(store.copy) in warning
    shelf.unlink()
    wait_until(lambda: len(caplog.messages) > 1)
    assert caplog.messages[1:] == [f"{store.address} is written again; nothing is missing"]
    (store.copy / "findings.jsonl").write_text("{}")
    assert mirror.close(20)
    parts = {f"sft/{folder}/part-000000.parquet" for folder in ("steps", "rollups/64")}
    assert sent_to(shelf) == {"sft/run.json", "sft/findings.jsonl", *parts}
    assert store.bring(shelf / "read") == len(sent_to(shelf / "read")) == 4
    assert not (store.copy / ".unsent").exists()


def test_addresses_survive_as_paths_and_keep_their_options():
    store = Store.of(Path("s3://bucket/runs/sft/"))
    assert (store.address, store.name) == ("s3://bucket/runs/sft", "sft")
    asked = Store.of("s3://bucket/sft?region=eu-west-1")
    assert str(asked.sibling("sft-2")) == "s3://bucket/sft-2?region=eu-west-1"


def test_passwords_in_addresses_are_refused():
    with pytest.raises(UsageError, match="give them by the environment"):
        Store.of("s3://key:secret@bucket/runs")
