import json
import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from rankscope.bus.bundles import ReplayBundle, save_bundle
from rankscope.bus.canary import CanaryResults, judge
from rankscope.bus.finding import Finding, Severity
from rankscope.cli import main
from rankscope.evidence.canary.batch import capture_batch
from rankscope.record import RunWriter
from rankscope.stats.arrays import MISSING_INT
from support.forked_ranks import run_on_ranks
from support.models import TinyLM, make_batch, make_model

TESTS = Path(__file__).parents[1]
FINDING = Finding(
    "rank-2", "data.worker_outlier", Severity.WARNING, (2,), 3, 9, "Rank 2 differs.", "Look."
)


def model() -> TinyLM:
    return make_model(7)


def other_parameter() -> TinyLM:
    made = make_model(7)
    if os.environ.get("RANK") == "1":
        with torch.no_grad():
            made.head.bias += 0.1
    return made


def other_arithmetic() -> TinyLM:
    made = make_model(7)
    if os.environ.get("RANK") == "1":
        made.head.register_forward_hook(lambda head, args, output: output * 1.01)
    return made


def other_code() -> TinyLM:
    made = make_model(7)
    if os.environ.get("RANK") == "1":
        made.head.forward = lambda hidden: hidden @ made.head.weight.T
    return made


def make_bundle(**other) -> ReplayBundle:
    suspect = make_batch(2, 0, size=8)
    suspect["labels"][5] = 49 - suspect["input_ids"][5]
    batches = tuple(capture_batch((), batch).plain() for batch in (suspect, make_batch(3, 0)))
    fields = {"reason": "rank-2", "step": 66, "suspect": 2, "peer": 3, "num_workers": 4}
    fields |= {"seed": 99, "autocast": "", "batches": batches, "finding": FINDING}
    return ReplayBundle(**{**fields, "versions": {"torch": "2.13"}, **other})


def with_results(digests, losses) -> ReplayBundle:
    digests, losses = np.array(digests), np.array(losses)
    results = CanaryResults(2, 3, losses, losses, digests, digests, losses, losses, digests)
    return make_bundle(results=results, verdict=judge(results))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(save_bundle(tmp_path, make_bundle()))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["replay", *arguments])


def text(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_bundle_is_shown(path: str):
    result = call(path)
    assert result.exit_code == 0
    for words in (
        "Rank 2 differs.",
        "66 of a run of 4 workers",
        "rank 2: 8 samples, 2 tensors (8×5, 8×5)",
        "torch 2.13",
        "The run has not replayed these batches.",
        f"Run them here: rankscope replay {path} --model MODULE:FUNCTION",
    ):
        assert words in text(result)


def test_the_labels_that_count_are_shown_for_both_batches(tmp_path):
    ids = torch.arange(1, 13).reshape(3, 4)
    labels = (ids + 0, ids.where(ids < 8, -100))
    batches = tuple(capture_batch((), {"ids": ids, "labels": own}).plain() for own in labels)
    said = text(call(str(save_bundle(tmp_path, make_bundle(batches=batches)))))
    assert "KiB, 12 of 12 labels count" in said
    assert "KiB, 7 of 12 labels count" in said


def test_one_process_repeats_and_shows_nothing_of_the_others(tmp_path):
    said = text(call(str(save_bundle(tmp_path, with_results([5], [1])))))
    assert "REPEATS This process repeats its own result in every bit" in said


NOTHING = "There is no result of rank 1, so nothing can be concluded"


@pytest.mark.parametrize(
    ("digests", "losses", "code", "words"),
    [
        ([5, 5, 5, 5], [1, 1, 1, 1], 0, "AGREES data All 4 workers agree on both batches"),
        ([5, 6, 5, 5], [1, 2, 1, 1], 1, "DIFFERS hardware Rank 1 computes a different result"),
        ([5, None, 5, 5], [1, 1, 1, 1], 1, f"DIFFERS inconclusive {NOTHING}"),
    ],
)
def test_the_verdict_of_the_run_is_shown(tmp_path, digests, losses, code, words):
    known = [MISSING_INT if digest is None else digest for digest in digests]
    path = save_bundle(tmp_path, with_results(known, losses))
    result = call(str(path))
    assert result.exit_code == code
    assert "Equal letters: equal bits of loss and gradient." in text(result)
    assert f"Run it again: rankscope replay {path} --model MODULE:FUNCTION" in text(result)
    assert words in text(result)
    told = json.loads(call(str(path), "--json").output)
    assert told["results"]["digests_W"] == digests
    assert told["verdict"]["verdict"] in words or "majority" in words


def test_ranks_of_a_group_are_those_of_the_job(tmp_path):
    job = {"id": "1", "base": "sft", "name": "sft-from-rank-1", "ranks": [1, 3, 5, 7]}
    RunWriter(tmp_path / "run", {"num_workers": 4, "job": job}).close()
    path = save_bundle(tmp_path / "run", with_results([5, 6, 5, 5], [1, 2, 1, 1]))
    said = text(call(str(path)))
    assert "Suspect rank 5: 8 samples" in said
    assert "Peer rank 7: " in said
    assert "Rank 3 computes a different result" in said
    rows = [line.split() for line in call(str(path)).output.splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["yes"]] == ["1", "3", "5", "7"]
    here = text(call(str(path), "--model", "cli.test_replay:model"))
    assert "Rank 5's samples with the largest loss" in here
    assert "Median of rank 7's samples" in here


def test_one_process_repeats_itself_and_names_the_worst_samples(path: str):
    result = call(path, "--model", "cli.test_replay:model", "--json")
    assert result.exit_code == 0
    told = json.loads(result.output)
    here = told["replayed"]
    assert here["verdict"]["verdict"] == "data"
    assert here["verdict"]["exact"]
    made, batch = model().eval(), make_bundle().batches[0]
    ids, labels = (torch.from_numpy(array) for array in batch.arrays)
    with torch.no_grad():
        losses = [made(ids[i : i + 1], labels[i : i + 1])["loss"].item() for i in range(8)]
    worst = sorted(range(8), key=lambda index: -losses[index])[:5]
    assert [sample["index"] for sample in here["worst_samples"]] == worst
    assert [sample["loss"] for sample in here["worst_samples"]] == [losses[i] for i in worst]
    digests = told["batches"][0]["samples"]
    assert [sample["digest"] for sample in here["worst_samples"]] == [digests[i] for i in worst]
    shown = text(call(path, "--model", "cli.test_replay:model"))
    assert "This process repeats its own result in every bit." in shown
    assert "samples with the largest loss" in shown


@pytest.mark.ranks
def test_on_ranks_that_agree(path: str, tmp_path: Path):
    """All ranks begin with the same parameters where a script seeds by rank."""
    script = """
        import os
        import torch
        from support.models import TinyLM
        torch.manual_seed(int(os.environ["RANK"]))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    code, out, err = run_on_ranks(3, ["replay", path, "--model", "script:TinyLM"], tmp_path)
    assert code == 0, err
    assert "All 3 workers agree on both batches in every bit." in " ".join(out.split())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other_parameter", "Parameters or buffers are known to differ (head.bias)."),
        ("other_arithmetic", "so it is hooks of head ("),
        ("other_code", 'What differs is "forward" of head (other_code.<locals>.<lambda>'),
    ],
)
def test_on_ranks_that_differ(path: str, name: str, words: str):
    code, out, err = run_on_ranks(3, ["replay", path, "--model", f"cli.test_replay:{name}"], TESTS)
    assert code == 1, err
    assert words in " ".join(out.split())
