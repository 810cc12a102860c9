import functools
import json

import pytest

from rankscope.lab.numerics.gradients import read
from rankscope.lab.study import rounding, rounding_result

QUICK = ("numerics", "--synthetic", "normal", "--workers", "2,8", "--orders", "4")


def test_tables_and_sentences(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = command(*QUICK)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["2", "0", "0", "0", "0", "0"] in lines
    assert "bfloat16" in out
    schemes = ["ring", "tree", "arrival"]
    assert [line[0] for line in lines if line and line[0] in schemes] == schemes
    starts = ("Why two runs differ: ", "Does it matter: ", "What to do: ")
    places = [out.index(f"\n  {start}") for start in starts]
    assert places == sorted(places)
    assert max(map(len, out.splitlines())) <= 120


def test_output_holds_the_numbers_and_the_page(tmp_path, command):
    folder = tmp_path / "new" / "numerics"
    code, out, err = command(*QUICK, "--types", "float32", "--json", "--output", folder)
    assert code == 0
    assert json.loads((folder / "numerics.json").read_text()) == json.loads(out)
    [page] = folder.glob("*.html")
    assert str(page) in err
    assert "<html" in page.read_text()[:200]
    assert list(folder.glob("*.png"))


def test_the_built_in_model_is_recorded_saved_and_trained(tmp_path, command, monkeypatch):
    record, options = rounding.record_gradients, rounding_result.GrowthOptions
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rounding, "record_gradients", functools.partial(record, base_steps=0))
    small = functools.partial(options, workers=2, base_steps=0, pairs=("order",))
    monkeypatch.setattr(rounding_result, "GrowthOptions", small)
    path = tmp_path / "kept.npz"
    words = ("--workers", "3", "--types", "float32", "--training-steps", "2", "--save", str(path))
    code, out, err = command("numerics", *words, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["sums"]["source"]["name"] == "built-in model, step 0"
    assert [layer["layer"] for layer in result["sums"]["layers"]][-1] == "model.norm"
    assert result["growth"]["options"]["steps"] == 2
    kept = read(path)
    assert kept.num_workers == 3
    assert kept.num_elements == result["sums"]["source"]["num_elements"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2,many"], "--workers expected whole numbers"),
        (["--orders", "1"], "from 2 to 1000 orders"),
        (["--gradients", "none.npz"], "there is no file none.npz"),
        (["--gradients", "none.npz", "--synthetic", "normal"], "give one of them"),
        (["--synthetic", "normal", "--save", "g.pt"], "--save writes a .npz file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, command, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("numerics", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
