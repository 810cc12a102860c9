import itertools
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from rankscope.lab.numerics import write_numerics_page
from rankscope.lab.numerics.gradients import GradientKind, LocalGradients, synthetic
from rankscope.lab.numerics.spread import SumOptions, measure
from rankscope.lab.study.rounding_result import TITLES, GrowthResult, PairResult, fit_growth
from rankscope.report.document import VEGALITE
from report.html_reader import Page

HOSTILE = "<script>alert(1)</script>{{ 7*7 }}"
SUM_FIGURES = {
    "error-float32", "error-bfloat16", "error-float16", "algorithms", "layers",
    "spread-median", "spread-p99", "spread-share",
}  # fmt: skip
GROWTH_FIGURES = {"growth-distance", "growth-evaluation", "growth-layers"}
STEPS = 30
LEVELS = {
    "order": 1e-8, "workers": 2e-8, "bfloat16": 3e-4, "float16": 1e-4, "float16-scaled": 8e-5,
    "data": 1e-2,
}  # fmt: skip


def sums_of(gradients: LocalGradients, workers: tuple[int, ...] = (2, 4, 8)) -> dict[str, Any]:
    return measure(gradients, SumOptions(workers=workers, orders=4))


def growth_of(names=tuple(TITLES), noise: float = 1.0) -> dict[str, Any]:
    evaluated = [10, 20, 30]
    pairs = []
    for name in names:
        level = LEVELS.get(name, 0.0) * noise
        distance = [level * step**0.5 for step in range(1, STEPS + 1)]
        share = [1.0 if level else 0.0] * STEPS
        layers = [
            {"group": group, "first_step": 1 if level else None, "distance": distance[-1]}
            for group in ("embed", "layers.0", HOSTILE)
        ]
        losses = [-level, 0.0, level]
        pairs.append(
            PairResult(
                name, distance, distance, share, share, share, distance, losses, layers,
                fit_growth(distance),
            )
        )  # fmt: skip
    facts = {
        "model": "small", "num_parameters": 1000, "data": HOSTILE, "samples": 99,
        "samples_per_step": 16,
    }  # fmt: skip
    options = {"steps": STEPS, "workers": 8, "optimizer": "adamw", "learning_rate": 5e-4}
    loss, held_out = [3.0] * STEPS, [3.1, 3.0, 2.9]
    return GrowthResult(options, facts, evaluated, loss, held_out, tuple(pairs)).to_json()


@pytest.fixture(scope="module")
def sums() -> dict[str, Any]:
    return sums_of(synthetic(GradientKind.NORMAL, 8, num_elements=400))


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def svg_of(page: Page, name: str, mode: str = "light", width: int = 460) -> str:
    svg: str = vl_convert.vegalite_to_svg(
        {**page.specs[name], "width": width},
        vl_version=VEGALITE,
        config=page.configs[mode],
        allowed_base_urls=[],
    )
    return svg


def test_page_holds_every_figure_and_each_is_drawn_in_both_modes(sums, tmp_path: Path):
    page = read(write_numerics_page(tmp_path / "new", sums, growth_of()))

    assert set(page.figures) == set(page.specs) == SUM_FIGURES | GROWTH_FIGURES
    for name, mode in itertools.product(page.specs, ("light", "dark")):
        assert "<path" in svg_of(page, name, mode), name
    pngs = sorted(path.name for path in (tmp_path / "new").glob("*.png"))
    assert pngs == [f"numerics-{name}.png" for name in ("error", "growth", "layers", "spread")]
    for name in pngs:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
