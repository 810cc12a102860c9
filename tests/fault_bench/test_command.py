"""The bench's command: its options, its verdict and files, and bad usage."""

import json

import pytest
from benchmarks.faults.command import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected ids of faults or --all"),
        (["X1"], "got X1; see"),
        (["D5", "--workers", "1"], "at least 2 workers, got 1"),
    ],
)
def test_bad_usage_is_told(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in err


@pytest.mark.ranks
def test_a_run_prints_verdict_and_findings_and_writes_files(capsys, tmp_path):
    files = ["--json", str(tmp_path / "f.json"), "--markdown", str(tmp_path / "f.md")]
    assert main(["d5", "--steps", "8", "--workers", "2", *files]) == 0
    out = capsys.readouterr().out
    assert out.startswith("D5 as expected after 0 steps")
    assert "error  data.duplicate_batches: Ranks 0 and 1 trained on identical batches" in out
    [score] = json.loads((tmp_path / "f.json").read_text())
    assert (score["id"], score["workers"], score["detected"]) == ("D5", 2, True)
    assert "## Exact faults" in (tmp_path / "f.md").read_text()


@pytest.mark.ranks
def test_an_interrupted_bench_goes_on_where_it_stood(capsys, tmp_path):
    file = tmp_path / "f.json"
    options = ["--steps", "8", "--workers", "2", "--json", str(file), "--resume"]
    main(["D5", *options])
    marked = json.loads(file.read_text())
    marked[0]["delay"] = 5  # so that one can see that it was not run again
    file.write_text(json.dumps(marked))
    capsys.readouterr()
    assert main(["D5", "D7", *options]) == 0
    out, err = capsys.readouterr()
    assert "D5 as expected after 5 steps" in out
    assert "D7 as expected" in out
    assert "D5" not in err
    assert [score["id"] for score in json.loads(file.read_text())] == ["D5", "D7"]
