import contextlib
import json
import logging
import math
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

import rankscope
from rankscope import Run, WatchOptions
from rankscope.bus.evidence import Table
from rankscope.errors import install_command
from rankscope.report import write_report
from rankscope.session.start import ALERTS
from rankscope.sinks import specs
from rankscope.sinks.grafana import dashboard
from rankscope.sinks.prometheus import PrometheusSink
from rankscope.sinks.tracked import open_run_of
from rankscope.verdict.words import facts
from sinks.servers import MailServer, WebServer, running
from sinks.test_feeder import Gated
from support.forked_ranks import torchrun
from support.loops import Loop, wait_for
from support.models import make_batch
from support.ranks import on_ranks, run_ranks

NUM_STEPS = 14
QUIET = {"canary": False, "hang_seconds": None, "overhead_budget": None}


def train(loop):
    """Train on two micro-batches a step; from step 5 on all ranks take rank 0's batches."""
    for step in range(NUM_STEPS):
        for micro in range(2):
            batch = make_batch(loop.rank if step < 5 else 0, 10 * step + micro)
            with loop.ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                loop.ddp(**batch)["loss"].backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def scraped(port):
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        if f"rankscope_step {NUM_STEPS - 1}.0" in text or time.monotonic() > deadline:
            return text
        time.sleep(0.01)


def problems_of(rank, ddp, run_dir):
    problems = []
    for sinks, missing in ((["csv"], False), (["wandb"], True)):
        hidden = mock.patch.object(specs, "find_spec", return_value=None)
        with hidden if missing and rank == 0 else contextlib.nullcontext():
            try:
                rankscope.watch(ddp, run_dir=run_dir, sinks=sinks if rank == 0 else (), **QUIET)
            except rankscope.RankscopeError as error:
                problems.append((type(error).__name__, str(error)))
    return problems


def wait_until_served(loop, port):
    wait_for(loop.scope, loop.scope._collector.step - 1)
    until = time.monotonic() + 60
    while "rankscope_loss_mean" not in (text := scraped(port)):
        assert time.monotonic() < until
        time.sleep(0.01)
    return text


def beside_training(rank, folder):
    reference = Loop(rank, None)
    problems = problems_of(rank, reference.ddp, f"{folder}/none")
    train(reference)
    prometheus = PrometheusSink(0)
    sinks = ["jsonl", prometheus, "tensorboard", Gated()]
    options = QUIET | {"sinks": sinks if rank == 0 else "csv"}  # rank 1's do not count
    loop = Loop(rank, f"{folder}/run", **options)
    train(loop)
    loop.scope._guard(loop.scope._collector.close_step)  # deliver the last step, as close would
    served = wait_until_served(loop, prometheus.port) if rank == 0 else ""
    loop.close()
    return problems, reference.bits() == loop.bits(), loop.warnings, served


ranks = on_ranks(beside_training, 2)


def test_what_rank_0_cannot_do_is_raised_on_all_ranks_before_anything_is_written(ranks):
    results, folder = ranks
    first, second = (problems for problems, *_ in results)
    assert first == second
    (usage, text), (missing, advice) = first
    assert (usage, missing) == ("UsageError", "MissingExtraError")
    assert "one of tensorboard" in text
    lacking = "the sink 'wandb' needs packages that are not installed: run "
    assert advice == lacking + install_command("wandb")
    assert not (folder / "none").exists()


def test_training_has_the_same_bits_and_ends_although_a_sink_never_does(ranks):
    results, _ = ranks
    assert [same for _, same, _, _ in results] == [True, True]
    (_, _, first, _), (_, _, second, _) = results
    assert second == []
    assert [message for message in first if "Gated did not end within 5 s" in message]
    assert not [message for message in first if "Gated" not in message]


def test_the_files_hold_what_the_run_tables_hold(ranks):
    _, folder = ranks
    run = Run.open(folder / "run")
    assert run.status == "complete"
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "run/findings.jsonl").read_text().splitlines()]
    assert [line["finding"] for line in lines if "finding" in line] == events
    assert "data.duplicate_batches" in {event["cause"] for event in events}
    steps = [line for line in lines if "step" in line]
    table = run.table(Table.STEPS).to_pylist()
    assert len(steps) == len(table) == NUM_STEPS
    for line, row in zip(steps, table, strict=True):
        assert (line["step"], line["time"]) == (row.pop("step"), row.pop("time"))
        prefix = "rankscope/"
        shown = {k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix)}
        counts = [shown.pop(f"findings_{severity}") for severity in ("note", "warning", "error")]
        assert shown == {name: float(value) for name, value in row.items() if value is not None}
    assert sum(counts) > 0
    workers = run.table(Table.WORKERS).to_pylist()
    for line in steps:
        losses = [row["loss"] for row in workers if row["step"] == line["step"]]
        assert line["rankscope_workers/loss/min"] == min(losses)
        assert math.isclose(line["rankscope_workers/loss/mean"], sum(losses) / 2, rel_tol=1e-12)


def test_everything_that_the_dashboard_asks_for_is_served(ranks):
    [(_, _, _, served), _], _ = ranks
    families = text_string_to_metric_families(served)
    samples = [sample for family in families for sample in family.samples]
    names = {sample.name for sample in samples}
    labels = {(sample.name, *pair) for sample in samples for pair in sample.labels.items()}
    document = json.loads(dashboard())
    asked = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    asked += [v["query"]["query"] for v in document["templating"]["list"] if v["type"] == "query"]
    text = "\n".join(asked)
    assert set(re.findall(r"rankscope_\w+", text)) <= names
    assert len(names) > 40
    for name, inside in re.findall(r"(rankscope_\w+)\{(.*?)\}", text):
        for label, value in re.findall(r'(\w+)="(\w+)"', inside):
            assert (name, label, value) in labels
    legends = [each["legendFormat"] for panel in document["panels"] for each in panel["targets"]]
    assert set(re.findall(r"\{\{(\w+)\}\}", "\n".join(legends))) <= {each[1] for each in labels}


SECRET = "tell-nobody"


def train_with_alerts(rank, folder, hook, mail):
    logging.getLogger("rankscope").setLevel(logging.DEBUG)
    watched = []
    for name, alerts in (("option", [hook, mail]), ("environment", ())):
        if not alerts:
            os.environ[ALERTS] = f"{hook} {mail}"
        loop = Loop(rank, f"{folder}/{name}", agent="process", alerts=alerts, announce=True)
        for step in range(NUM_STEPS):
            loop.step(step, rank=0)
        loop.close()
        watched.append(loop)
    plain = Loop(rank, None)
    for step in range(NUM_STEPS):
        plain.step(step, rank=0)
    sent_here = {"rankscope.sinks.webhook", "rankscope.sinks.mail"} & set(sys.modules)
    bits = [loop.bits() == plain.bits() for loop in watched]
    return [loop.warnings for loop in watched], bits, sent_here


@pytest.mark.ranks
def test_alerts_come_from_the_agent_and_their_places_are_recorded_nowhere(tmp_path):
    with running(WebServer) as http, running(MailServer) as mail:
        hook = f"slack:http://127.0.0.1:{http.server_port}/T0/{SECRET}"
        mailto = f"mailto:{SECRET}@example.org?smtp={mail.place}"
        results = run_ranks(train_with_alerts, 2, str(tmp_path), hook, mailto)
        messages, recipients = list(mail.messages), set(mail.recipients)
        got = list(http.got)
    assert results == [([[], []], [True, True], set())] * 2
    assert {path for path, *_ in got} == {f"/T0/{SECRET}"}
    assert all(body.keys() == {"text"} for _, _, body, _ in got)
    for name in ("option", "environment"):
        text = next(body["text"] for _, _, body, _ in got if body["text"].startswith(f"{name}: "))
        assert "data.duplicate_batches opened on ranks 0 and 1" in text
        assert f"rankscope report {tmp_path / name}" in text
        run = Run.open(tmp_path / name)
        write_report(run)
        files = [path for path in run.path.rglob("*") if path.is_file()]
        assert run.path / "report.html" in files
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert recipients == {f"<{SECRET}@example.org>"}
    assert {str(one["Subject"]).split(": ")[1] for one in messages} == {"option", "environment"}
    assert SECRET not in repr(WatchOptions(alerts=[hook, mailto]))


EXAMPLE = Path(__file__).parents[2] / "examples" / "sinks.py"
COMMAND = 'command:echo "$RANKSCOPE_SEVERITY $RANKSCOPE_CAUSE $RANKSCOPE_EVENT"'


@pytest.mark.ranks
def test_the_example_tells_of_its_fault(tmp_path):
    assert COMMAND in EXAMPLE.read_text()
    options = ["--steps", "20", "--forget-sampler", "--slowest", "--sink", "jsonl"]
    command = [str(EXAMPLE), "--run-dir", "run", *options, "--sink", COMMAND]
    code, out, err = torchrun(["--nproc-per-node", "2"], *command, folder=tmp_path)
    assert code == 0, err
    lines = out.splitlines()
    opened = [line for line in lines if line.endswith("opened")]
    assert opened == ["error data.duplicate_batches opened"]
    [counts] = [line for line in lines if line.startswith("slowest")]
    counted = sum(json.loads(counts.partition(": ")[2]))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if "step" in row]
    busy = [row for row in steps if "rankscope_workers/busy_seconds/max" in row]
    assert len(steps) == 20
    assert counted == len(busy) > 10


def test_nothing_is_taken_over_without_a_sink_or_a_run():
    assert open_run_of([]) == {}
    assert open_run_of(["jsonl", "webhook to example.org"]) == {}


def begin(rank, folder):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    assert open_run_of(["wandb", "mlflow"]) == {}
    import mlflow
    import wandb

    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    described = {"group": "seeds", "tags": ["a", "b"], "notes": "see https://me:pw@example.org/x"}
    run = wandb.init(project="p", name="first try", **described) if rank == 0 else None
    for name in ("wandb", "mlflow"):
        if name == "mlflow" and rank == 0:
            run.finish()
            mlflow.start_run(run_name="second try", tags={"stage": "dev"}, description="why")
        loop = Loop(rank, f"{folder}/beside-{name}", sinks=name)
        loop.step(0)
        loop.close()
    if rank == 0:
        mlflow.end_run()
    return loop.warnings


@pytest.mark.ranks
def test_name_group_tags_and_notes_are_those_of_the_open_run(tmp_path):
    assert run_ranks(begin, 2, str(tmp_path)) == [[], []]
    info = Run.open(tmp_path / "beside-wandb").info
    tracked = info["tracked"]
    assert tracked.pop("notes").startswith("see https://")
    assert "pw" not in str(info)
    assert tracked == {
        "tracker": "wandb", "name": "first try", "group": "seeds", "tags": ["a", "b"]
    }  # fmt: skip
    shown = dict(facts(info, "complete", 2, 1))
    assert (shown["Run in wandb"], shown["Group"], shown["Tags"]) == ("first try", "seeds", "a, b")
    assert Run.open(tmp_path / "beside-mlflow").info["tracked"] == {
        "tracker": "mlflow", "name": "second try", "tags": ["stage=dev"], "notes": "why"
    }  # fmt: skip
