"""``rankscope faults``: its list, its options, and what it says of bad usage."""

import json
import signal
import subprocess
import sys

import pytest

from rankscope.cli import main
from rankscope.faults.catalogue import catalogue


def call(monkeypatch, capsys, *words):
    """Run the command in this process; its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["rankscope", *words])
    with pytest.raises(SystemExit) as ended:
        main.run()
    return (ended.value.code, *capsys.readouterr())


def test_the_list_shows_every_fault(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(monkeypatch, capsys, "faults", "list")
    assert code == 0
    for fault in catalogue().values():
        [line] = [line for line in out.splitlines() if line.split(" ")[0] == fault.id]
        assert fault.mechanism[:40] in line
        assert str(fault.fault_class) in line


def test_the_list_as_json(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "faults", "list", "--json")
    assert code == 0
    rows = {row["id"]: row for row in json.loads(out)}
    assert rows.keys() == catalogue().keys()
    assert rows["T2"]["causes"] == ["state.parameters_differ"]
    assert rows["H1"]["severity"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected ids of faults or --all"),
        (["D5", "--all"], "expected ids of faults or --all"),
        (["X1"], "got X1; see rankscope faults list"),
        (["D5", "--workers", "1"], "at least 2 workers, got 1"),
        (["D5", "--steps", "1"], "at least 2 steps, got 1"),
        (["D5", "--seed", "-1"], "a seed of 0 or more, got -1"),
        (["D5", "--resume"], "name it with --json"),
        (["--all", "--full", "--seed", "3"], "--full chooses workers and seeds itself"),
    ],
)
def test_bad_usage_is_told_in_one_line(monkeypatch, capsys, words, said):
    code, out, err = call(monkeypatch, capsys, "faults", "run", *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


@pytest.mark.ranks
def test_a_run_prints_verdict_and_findings_and_writes_files(monkeypatch, capsys, tmp_path):
    files = ["--json", str(tmp_path / "f.json"), "--markdown", str(tmp_path / "f.md")]
    code, out, _ = call(
        monkeypatch, capsys, "faults", "run", "d5", "--steps", "8", "--workers", "2", *files
    )
    assert code == 0
    assert out.startswith("D5 as expected after 0 steps")
    assert "error  data.duplicate_batches: Ranks 0 and 1 trained on identical batches" in out
    [score] = json.loads((tmp_path / "f.json").read_text())
    assert (score["id"], score["workers"], score["detected"]) == ("D5", 2, True)
    assert "## Exact faults" in (tmp_path / "f.md").read_text()


@pytest.mark.ranks
def test_an_interrupted_bench_goes_on_where_it_stood(monkeypatch, capsys, tmp_path):
    file = tmp_path / "f.json"
    options = ["--steps", "8", "--workers", "2", "--json", str(file), "--resume"]
    call(monkeypatch, capsys, "faults", "run", "D5", *options)
    marked = json.loads(file.read_text())
    marked[0]["delay"] = 5  # so that one can see that it was not run again
    file.write_text(json.dumps(marked))
    code, out, err = call(monkeypatch, capsys, "faults", "run", "D5", "D7", *options)
    assert code == 0
    assert "D5 as expected after 5 steps" in out
    assert "D7 as expected" in out
    assert "D5" not in err
    assert [score["id"] for score in json.loads(file.read_text())] == ["D5", "D7"]


@pytest.mark.ranks
def test_ctrl_c_ends_with_what_is_scored(tmp_path):
    words = ["run", "D5", "H1", "--workers", "2", "--steps", "100"]
    files = ["--json", "f.json", "--markdown", "f.md"]
    command = [sys.executable, "-m", "rankscope", "faults", *words, *files]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=tmp_path) as bench:
        first = bench.stderr.readline()
        bench.send_signal(signal.SIGINT)  # the second has begun, and takes seconds
        out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert first.startswith("D5 as expected after 0 steps")
    assert err == "rankscope: interrupted after 1 of 2 runs; --resume --json f.json goes on\n"
    assert out.startswith(first)
    assert [score["id"] for score in json.loads((tmp_path / "f.json").read_text())] == ["D5"]
    assert "1 of 2 runs are still to be made" in (tmp_path / "f.md").read_text()


def test_a_file_without_scores_is_not_continued(monkeypatch, capsys, tmp_path):
    file = tmp_path / "f.json"
    file.write_text("[{}]")
    words = ["faults", "run", "D5", "--json", str(file), "--resume"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert "--resume expected scores that --json has written" in " ".join(err.split())
    assert file.read_text() == "[{}]"
