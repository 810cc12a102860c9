import json
import re
from functools import partial

import pytest
from benchmarks.diff_training import Flip, Variant, train_variants

from numerics.diff_runs import Training, write_training
from support.ranks import run_ranks

STEPS = 7
FLIP = Flip(step=4, bit=12, where="parameter", ranks=(0,), seed=5)
BASE = Variant("base", steps=STEPS, reduction="gathered", order=(0, 1, 2))
VARIANTS = [
    BASE,
    BASE.but("again"),
    BASE.but("arrival", order=(2, 0, 1)),
    BASE.but("lr", lr=1.1e-3, lr_from=3),
    BASE.but("data", order_seed=9, order_from=2),
    BASE.but("init", init_seed=9),
    BASE.but("flip", flip=FLIP),
    BASE.but("part", stop=3),
    BASE.but("resumed", resume="part", restore_random=False),
]


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(train_variants, 3, str(folder), VARIANTS)
    return folder


@pytest.fixture
def command(command):
    return partial(command, "diff")


@pytest.mark.parametrize(
    ("other", "kind", "step", "stage"),
    [
        ("again", "identical", None, None),
        ("arrival", "rounding", 0, "gradient"),
        ("lr", "different configuration", 3, "settings"),
        ("data", "different data", 2, "samples"),
        ("init", "different state", 0, "start"),
        ("flip", "bug-like jump", 4, "update"),
        ("part-2", "different state", 3, "random state"),
    ],
)
def test_real_pairs_are_told_with_class_and_first_step(runs, command, other, kind, step, stage):
    code, printed, errors = command(runs / "base", runs / other, "--json")
    found = json.loads(printed)
    assert not errors
    assert found["class"] == kind
    assert code == (0 if kind == "identical" else 1)
    parting = found["parting"] or {"step": None, "stage": None}
    assert (parting["step"], parting["stage"]) == (step, stage)


def test_the_page_opens_offline_and_the_figure_is_an_image(runs, command, tmp_path):
    page, figure = tmp_path / "diff.html", tmp_path / "diff.png"
    written = ("--html", page, "--png", figure)
    code, printed, _ = command(runs / "base", runs / "arrival", "--json", *written)
    assert code == 1
    assert json.loads(printed)["written"] == [str(page), str(figure)]
    assert figure.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    for words in ("rounding alone", 'data-figure="apart"', 'data-figure="tensors"'):
        assert words in text
    assert not re.findall(r'(?:src|href)="https?:', text)
    specs = json.loads(re.findall(r'id="figures">(.*?)</script>', text, re.S)[0])
    points = next(t for t in specs["datasets"].values() if "curve" in t)
    assert set(points["curve"]) == {"loss", "gradient", "parameters"}


def test_bad_input_is_said_in_one_line(command, tmp_path):
    run = tmp_path / "a"
    write_training(run, Training(steps=3))
    write_training(tmp_path / "empty", Training(steps=0))
    (tmp_path / "nothing").mkdir()
    write_training(tmp_path / "torn", Training(steps=3))
    torn = next((tmp_path / "torn" / "workers").glob("*.parquet"))
    torn.write_bytes(torn.read_bytes()[:-20])
    told = {"absent": "no run directory", "nothing": "no run.json", "torn": "it is damaged"}
    for other, words in {**told, "empty": "no recorded step", "a": "are one run"}.items():
        code, printed, errors = command(run, tmp_path / other)
        assert code == 2
        assert not printed
        assert words in errors
        assert len(errors.splitlines()) == 1
