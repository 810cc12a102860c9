import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import RunError
from rankscope.report.live import board, catalog
from rankscope.report.live.board import Board
from rankscope.report.live.catalog import MAX_DEPTH, ListedPlace, id_of, places, stamp
from report.live.serving import Training


def run_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_runs_are_found_at_any_depth_and_named_by_their_paths(tmp_path: Path):
    for name in ("a", "study/runs/s1-1", "study/runs/s1-2", ".hidden/run", "a/inside"):
        run_at(tmp_path / name)
    run_at(tmp_path.joinpath(*"123456"[: MAX_DEPTH - 1], "deep"))
    run_at(tmp_path.joinpath(*"abcdef"[:MAX_DEPTH], "too-deep"))

    found, cut = places(tmp_path)
    assert not cut
    assert set(found) == {"a", "study/runs/s1-1", "study/runs/s1-2", "1/2/3/4/5/deep"}
    assert found["study/runs/s1-2"].path == tmp_path / "study/runs/s1-2"


def test_the_directory_may_be_a_run(tmp_path: Path):
    run = run_at(tmp_path / "sft")
    assert [(place.id, place.path) for place in places(run).places.values()] == [("sft", run)]


def test_a_directory_without_runs_and_one_that_is_not_there(tmp_path: Path):
    assert places(tmp_path) == ({}, False)
    assert places(tmp_path / "nothing") == ({}, False)


@pytest.mark.parametrize("data", ["data/train", "a/b/c", "z"])
def test_many_folders_of_data_hide_no_run_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
):
    for number in range(60):
        (tmp_path / data / f"n{number:08}" / "images").mkdir(parents=True)
    runs = [f"runs/exp-{n}/2026/november/seed-0" for n in range(3)]
    for name in (*runs, "zz/run", f"{data}/n00000059/run"):
        run_at(tmp_path / name)
    assert places(tmp_path).cut is False
    assert len(places(tmp_path).places) == 5

    monkeypatch.setattr(catalog, "MAX_DIRECTORIES", 30)
    found, cut = places(tmp_path)
    assert cut
    assert list(found) == ["zz/run", *runs]


def test_folders_of_code_hide_no_run_among_many_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for path in (f"{a}/{b}/{c}/{d}" for a in "ab" for b in "abcd" for c in "abcd" for d in "abcd"):
        (tmp_path / "code" / path).mkdir(parents=True)
    names = [f"projects/{n:02}/run" for n in range(20)]
    for name in names:
        run_at(tmp_path / name)
    monkeypatch.setattr(catalog, "MAX_DIRECTORIES", 60)
    assert list(places(tmp_path).places) == names


@pytest.mark.parametrize("with_run", [True, False])
def test_a_search_that_was_cut_is_told_on_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_run: bool
):
    words = "Serve a directory that holds the runs and less besides"
    root = tmp_path / "home"
    for number in range(5):
        (root / f"data/{number}").mkdir(parents=True)
    if with_run:
        run_at(root / "run")
    whole = Board(root).sheet("runs")
    for module in (catalog, board):
        monkeypatch.setattr(module, "MAX_DIRECTORIES", 3)
    cut = Board(root).sheet("runs")
    assert whole is not None
    assert cut is not None
    assert words not in whole.main
    assert words in cut.main
    assert "home holds more than 3 directories" in cut.main
    assert ("No runs here yet" in cut.main) != with_run


NAMES = ["<script>alert(1)</script>", "a b", "ä", "..a", "a%2F..", "a\nb", "-x", "~", "a~b"]


def test_any_name_has_an_id_of_its_own_that_needs_no_escaping():
    ids = [id_of(name) for name in (*NAMES, "ü/ä", "ab/c", "a-b", os.fsdecode(b"\xff"))]
    assert len(set(ids)) == len(ids)
    for made in ids:
        assert all(sign.isascii() and (sign.isalnum() or sign in "._-~/") for sign in made), made
        assert not {"", ".", ".."} & set(made.split("/"))
    assert id_of("ab/c") == "ab/c"


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let nobody look into a directory, as its permissions do for all but root."""

    def guarded(call: Callable[..., Any], inside: bool) -> Callable[..., Any]:
        def refuse(path: Any = ".", *args: Any, **named: Any) -> Any:
            asked = Path(os.fsdecode(path)) if not isinstance(path, int) else Path()
            if folder in asked.parents or (inside and asked == folder):
                raise PermissionError(13, "Permission denied", str(asked))
            return call(path, *args, **named)

        return refuse

    monkeypatch.setattr("os.stat", guarded(os.stat, inside=False))
    monkeypatch.setattr("os.scandir", guarded(os.scandir, inside=True))


def test_a_directory_that_may_not_be_entered_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_at(tmp_path / "good")
    run_at(tmp_path / "lost+found")
    forbid(monkeypatch, tmp_path / "lost+found")
    assert set(places(tmp_path).places) == {"good"}


def test_a_run_that_may_not_be_entered_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_at(tmp_path / "run")
    place = ListedPlace("run", run, "run")
    (run / "steps").mkdir()
    (run / "steps" / "part-000000.parquet").touch()
    seen = stamp(place, tmp_path)
    with monkeypatch.context() as patch:
        forbid(patch, run / "steps")
        hidden = stamp(place, tmp_path)
    assert None not in (seen, hidden)
    assert hidden != seen
    forbid(monkeypatch, run)
    with pytest.raises(RunError, match=r"cannot read .*run \(Permission denied\): check the path"):
        stamp(place, tmp_path)


def test_links_are_not_followed(tmp_path: Path):
    run_at(tmp_path / "elsewhere/run")
    served = tmp_path / "served"
    served.mkdir()
    (served / "out").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert places(served).places == {}


def test_a_stamp_changes_when_the_run_does_and_only_then(tmp_path: Path):
    training = Training(tmp_path / "run")
    place = ListedPlace("run", tmp_path / "run", "run")
    stamps = []
    for _ in range(2):
        stamps.append(stamp(place, tmp_path))
        training.steps(1)
    stamps.append(stamp(place, tmp_path))
    (place.path / "report.html").write_text("not a part of the run")
    (place.path / "findings.jsonl").touch()
    os.utime(place.path / "run.json", (1, 1))

    assert None not in stamps
    assert len({at.token for at in stamps if at}) == 3
    last = stamp(place, tmp_path)
    assert last is not None
    assert last != stamps[-1]
    assert last == stamp(place, tmp_path)
    (place.path / "run.json").chmod(0o604)  # it could not be read before, perhaps
    assert last != stamp(place, tmp_path)
    training.close()


def test_a_run_that_is_gone_has_no_stamp(tmp_path: Path):
    assert stamp(ListedPlace("run", tmp_path / "run", "run"), tmp_path) is None
    (tmp_path / "run").mkdir()
    assert stamp(ListedPlace("run", tmp_path / "run", "run"), tmp_path) is None


@pytest.mark.parametrize(
    "part",
    [
        *("run.json", "findings.jsonl", "detectors-start.npz", "steps", "rollups/samples"),
        *("steps/part-000000.parquet", "rollups/samples/part-000000.parquet"),
    ],
)
def test_a_part_that_leads_out_of_the_directory_is_refused(tmp_path: Path, part: str):
    served = tmp_path / "served"
    run = run_at(served / "run")
    secret = tmp_path / "secret"
    secret.mkdir() if "." not in part else secret.write_text("{}")
    (run / part).parent.mkdir(exist_ok=True, parents=True)
    (run / part).unlink(missing_ok=True)
    (run / part).symlink_to(secret)

    with pytest.raises(RunError, match="leads out of the served directory"):
        stamp(ListedPlace("run", run, "run"), served)
    (run / part).unlink()
    inside = served / "kept"
    inside.mkdir() if "." not in part else inside.write_text("{}")
    (run / part).symlink_to(inside)
    assert stamp(ListedPlace("run", run, "run"), served) is not None


def test_settings_of_a_path_that_nobody_can_read_make_no_columns():
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    found: dict[str, Any] = {}
    catalog._flatten({"optimizer": {"lr": 0.1}, "deep": deep, "x" * 81: 1}, "", found)
    assert found == {"optimizer.lr": 0.1}
