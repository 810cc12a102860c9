import pytest

from rankscope.errors import RunError
from rankscope.report.live import catalog
from rankscope.report.live.catalog import MAX_DEPTH, ListedPlace, places, stamp


def run_at(path):
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_runs_are_found_at_any_depth_and_named_by_their_paths(tmp_path):
    for name in ("a", "study/runs/s1-1", "study/runs/s1-2", ".hidden/run", "a/inside"):
        run_at(tmp_path / name)
    run_at(tmp_path.joinpath(*"123456"[: MAX_DEPTH - 1], "deep"))
    run_at(tmp_path.joinpath(*"abcdef"[:MAX_DEPTH], "too-deep"))

    found, cut = places(tmp_path)
    assert not cut
    assert set(found) == {"a", "study/runs/s1-1", "study/runs/s1-2", "1/2/3/4/5/deep"}
    assert found["study/runs/s1-2"].path == tmp_path / "study/runs/s1-2"


def test_many_folders_of_data_hide_no_run_beside_them(tmp_path, monkeypatch):
    for number in range(60):
        (tmp_path / "data/train" / f"n{number:08}" / "images").mkdir(parents=True)
    runs = [f"runs/exp-{n}/2026/november/seed-0" for n in range(3)]
    for name in (*runs, "zz/run", "data/train/n00000059/run"):
        run_at(tmp_path / name)
    assert places(tmp_path).cut is False
    assert len(places(tmp_path).places) == 5

    monkeypatch.setattr(catalog, "MAX_DIRECTORIES", 30)
    found, cut = places(tmp_path)
    assert cut
    assert list(found) == ["zz/run", *runs]


@pytest.mark.parametrize(
    "part",
    [
        *("run.json", "findings.jsonl", "detectors-start.npz", "steps", "rollups/samples"),
        *("steps/part-000000.parquet", "rollups/samples/part-000000.parquet"),
    ],
)
def test_a_part_that_leads_out_of_the_directory_is_refused(tmp_path, part):
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
