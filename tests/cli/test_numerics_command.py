"""``rankscope numerics``: tables, JSON, files and errors."""

import builtins
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from rankscope.cli import main
from rankscope.errors import install_command
from rankscope.lab.numerics.gradients import read
from rankscope.lab.study import rounding, rounding_result

OPTIONS = {
    "--at-step",
    "--gradients",
    "--json",
    "--orders",
    "--output",
    "--save",
    "--seed",
    "--synthetic",
    "--training-steps",
    "--types",
    "--workers",
}
QUICK = ("numerics", "--synthetic", "normal", "--workers", "2,8", "--orders", "4")

Monkey = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def call(
    monkeypatch: Monkey, capsys: Capture, *words: str, columns: str = "120"
) -> tuple[int, str, str]:
    """Run the command in this process; its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["rankscope", *words])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert isinstance(ended.value.code, int)
    return (ended.value.code, *capsys.readouterr())


def test_the_options_are_frozen() -> None:
    commands: Any = typer.main.get_command(main.app)
    found = commands.commands["numerics"]
    context = found.make_context("rankscope", [], resilient_parsing=True)
    names = {name for parameter in found.get_params(context) for name in parameter.opts}
    assert {name for name in names if name.startswith("--")} - {"--help"} == OPTIONS


def test_help_names_the_options_and_the_exit_code(monkeypatch: Monkey, capsys: Capture) -> None:
    code, out, err = call(monkeypatch, capsys, "numerics", "--help")
    assert (code, err) == (0, "")
    assert all(option in out for option in OPTIONS)
    assert "Exit code: 0" in out


def test_tables_and_sentences(monkeypatch: Monkey, capsys: Capture) -> None:
    code, out, err = call(monkeypatch, capsys, *QUICK)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["2", "0", "0", "0", "0", "0"] in lines
    assert out.count("bfloat16\n") or "bfloat16" in out
    assert [line[0] for line in lines if line and line[0] in {"ring", "tree", "arrival"}] == [
        *("ring", "tree", "arrival")
    ]
    for start in ("Why two runs differ: ", "Does it matter: ", "What to do: "):
        assert f"\n  {start}" in out
    assert out.index("Why two runs differ") < out.index("Does it matter") < out.index("What to do")
    assert max(map(len, out.splitlines())) <= 120


def test_tables_fit_a_usual_terminal(monkeypatch: Monkey, capsys: Capture) -> None:
    code, out, _ = call(monkeypatch, capsys, *QUICK, columns="80")
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_what_the_tables_show(monkeypatch: Monkey, capsys: Capture) -> None:
    code, out, err = call(monkeypatch, capsys, *QUICK, "--types", "bfloat16", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert list(result) == ["sums", "growth"]
    assert result["growth"] is None
    assert result["sums"]["source"]["name"] == "normal"
    kinds = {(cell["inputs"], cell["sums"]) for cell in result["sums"]["cells"]}
    assert kinds == {("bfloat16", "float32"), ("bfloat16", "bfloat16")}
    assert {cell["workers"] for cell in result["sums"]["cells"]} == {2, 8}
    _, table, _ = call(monkeypatch, capsys, *QUICK, "--types", "bfloat16")
    [cell] = [
        cell
        for cell in result["sums"]["cells"]
        if (cell["workers"], cell["sums"], cell["algorithm"]) == (8, "bfloat16", "tree")
    ]
    [row] = [line.split() for line in table.splitlines() if line.split()[:1] == ["tree"]]
    assert row[1:3] == ["4", str(cell["distinct_results"])]
    assert row[-2:] == [f"{cell['error_relative']:.1e}", f"{cell['bound_relative']:.1e}"]


def test_a_users_own_gradients(tmp_path: Path, monkeypatch: Monkey, capsys: Capture) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, **{"model.layers.0.w": rng.standard_normal((4, 6, 5)), "head": np.ones((4, 3))})
    words = ("numerics", "--gradients", str(path), "--workers", "4,6", "--types", "float32")
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    assert "mine.npz, 4 workers, 33 elements each" in out
    assert "\n  model.layers.0 " in out
    assert "for 6 workers the missing ones were made up" in " ".join(out.split())


def test_output_holds_the_numbers_and_the_page(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture
) -> None:
    folder = tmp_path / "new" / "numerics"
    words = (*QUICK, "--types", "float32", "--json", "--output", str(folder))
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 0
    assert json.loads((folder / "numerics.json").read_text()) == json.loads(out)
    [page] = folder.glob("*.html")
    assert str(page) in err
    assert "<html" in page.read_text()[:200]
    assert list(folder.glob("*.png"))


def test_without_the_packages_for_figures_the_numbers_are_written(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture
) -> None:
    plain = builtins.__import__

    def without_jinja(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "jinja2":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain(name, *rest)

    pages = ("rankscope.report", "rankscope.lab.numerics.page")
    for name in [name for name in sys.modules if name.startswith(pages)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_jinja)
    code, out, err = call(
        monkeypatch, capsys, *QUICK, "--types", "float32", "--output", str(tmp_path)
    )
    assert (code, err) == (0, "")
    assert install_command("web") in out
    assert [path.name for path in tmp_path.iterdir()] == ["numerics.json"]


def test_the_built_in_model_is_recorded_saved_and_trained(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture
) -> None:
    record, options = rounding.record_gradients, rounding_result.GrowthOptions
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = functools.partial(record, base_steps=0, batch_size=1)
    monkeypatch.setattr(rounding, "record_gradients", quick)
    small = functools.partial(options, workers=2, base_steps=0, pairs=("order",))
    monkeypatch.setattr(rounding_result, "GrowthOptions", small)
    path = tmp_path / "kept.npz"
    words = ("--workers", "3", "--types", "float32", "--training-steps", "2", "--save", str(path))
    code, out, err = call(monkeypatch, capsys, "numerics", *words, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["sums"]["source"]["name"] == "built-in model, step 0"
    assert [layer["layer"] for layer in result["sums"]["layers"]][-1] == "model.norm"
    assert result["growth"]["options"]["steps"] == 2
    kept = read(path)
    assert kept.num_workers == 3
    assert kept.num_elements == result["sums"]["source"]["num_elements"]


def test_the_built_in_model_is_trained_by_default(monkeypatch: Monkey) -> None:
    from rankscope.cli.numerics import DEFAULT_TRAINING_STEPS, _training_steps

    assert _training_steps(None, builtin=True) == DEFAULT_TRAINING_STEPS > 0
    assert _training_steps(None, builtin=False) == 0
    assert _training_steps(0, builtin=True) == 0
    assert _training_steps(7, builtin=False) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2,many"], "--workers expected whole numbers"),
        (["--workers", "1"], "numbers of workers from 2 to"),
        (["--workers", ""], "numbers of workers from 2 to"),
        (["--orders", "1"], "from 2 to 1000 orders"),
        (["--types", "float8"], "got float8"),
        (["--types", ","], "got none"),
        (["--seed", "-1"], "--seed must be between"),
        (["--synthetic", "strange"], "Invalid value for '--synthetic'"),
        (["--gradients", "none.npz"], "there is no file none.npz"),
        (["--gradients", "none.npz", "--synthetic", "normal"], "give one of them"),
        (["--gradients", "none.npz", "--save", "b.npz"], "leave one of them out"),
        (["--synthetic", "normal", "--at-step", "3"], "--at-step is a step of the built-in"),
        (["--at-step", "-1"], "expected a step from 0"),
        (["--synthetic", "normal", "--save", "g.pt"], "--save writes a .npz file"),
        (["--synthetic", "normal", "--training-steps", "-1"], "expected 0 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, "numerics", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_gradients_is_one_line(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture
) -> None:
    path = tmp_path / "g.npz"
    path.write_text("no numbers")
    code, out, err = call(monkeypatch, capsys, "numerics", "--gradients", str(path))
    assert (code, out) == (2, "")
    assert "does not hold numpy arrays" in err
    assert len(err.splitlines()) == 1


def test_an_output_that_cannot_be_written(
    tmp_path: Path, monkeypatch: Monkey, capsys: Capture
) -> None:
    (tmp_path / "taken").write_text("a file")
    words = (*QUICK, "--types", "float32", "--output", str(tmp_path / "taken"))
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert "cannot be written" in err
