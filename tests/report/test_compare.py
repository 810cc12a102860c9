import pytest
import vl_convert

from rankscope.record import Run
from rankscope.report.compare import compare_view
from rankscope.report.document import VEGALITE
from rankscope.report.parts import Tables
from report.recorded_runs import record_run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_run(tmp_path_factory.mktemp("other") / "less", num_workers=3, num_steps=20)


def test_both_runs_are_in_every_figure_and_can_be_told_apart_in_grey(healthy_run: Run, other: Run):
    tables = Tables()
    view = compare_view(tables, healthy_run, other, "x-")

    assert set(view.specs) == {
        f"x-compare-{name}" for name in ("loss", "loss_std", "grad_norm_std", "cosine_mean")
    }
    for name, spec in view.figures.items():
        assert name in view.titles
        svg = vl_convert.vegalite_to_svg(
            {**spec, "width": 300, "datasets": tables.rows}, vl_version=VEGALITE
        )
        assert "stroke-dasharray" in svg
        assert ">A<" in svg
        assert ">B<" in svg
        letters = [layer["mark"] for layer in spec["layer"] if layer["mark"]["type"] == "text"]
        assert [mark["clip"] for mark in letters] == [False, False]  # curves are cut when zoomed
