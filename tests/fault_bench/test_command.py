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
def test_a_run_prints_and_writes_what_is_found_and_goes_on_where_it_stood(capsys, tmp_path):
    file, page = tmp_path / "f.json", tmp_path / "f.md"
    options = ["--steps", "8", "--workers", "2", "--json", str(file), "--markdown", str(page)]
    assert main(["d5", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("D5 as expected after 0 steps")
    assert "error  data.duplicate_batches: Ranks 0 and 1 trained on identical batches" in out
    marked = json.loads(file.read_text())
    [score] = marked
    assert (score["id"], score["workers"], score["detected"]) == ("D5", 2, True)
    assert "## Exact faults" in page.read_text()

    score["delay"] = 5  # so that one can see that it was not run again
    file.write_text(json.dumps(marked))
    assert main(["D5", "D7", *options, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "D5 as expected after 5 steps" in out
    assert "D7 as expected" in out
    assert "D5" not in err
    assert [score["id"] for score in json.loads(file.read_text())] == ["D5", "D7"]
