"""``rankscope demo``: two trainings on real ranks, and what is said of them."""

import json

import pytest

from rankscope.cli import demo, main
from rankscope.record import Run


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["rankscope", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.run()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_a_healthy_training_and_one_whose_sampler_was_forgotten(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STEPS", 40)
    folder = tmp_path / "demo"
    code, out, err = call("demo", "--output", folder, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["healthy"]["severity"] is None
    assert told["forgotten-sampler"]["severity"] == "error"
    assert told["forgotten-sampler"]["findings"][0]["cause"] == "data.duplicate_batches"
    assert "Training on 2 workers" in err
    page = (folder / "report.html").read_text()
    assert "train on the same batches" in page
    for name in demo.TRAININGS:
        assert Run.open(folder / name).status == "complete"
    code, _, err = call("demo", "--output", folder)
    assert code == 2
    assert "already holds a demo: add --overwrite" in err


def test_a_training_that_fails_is_said(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STEPS", "no number")
    code, _, err = call("demo", "--output", tmp_path / "demo")
    assert code == 2
    assert "the training failed: worker" in err
    assert "ValueError" in (tmp_path / "demo" / "error.log").read_text()
