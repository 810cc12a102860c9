"""Scripts of others under ``rankscope run``; the quickest of ``make field``."""

import importlib
import warnings
from dataclasses import replace
from functools import partial

import pytest

from rankscope import Severity
from support.benchmarks import load_benchmark
from support.forked_ranks import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

QUICK = (
    *("trl sft --packing", "deepspeed_loop 2", "lightning_validation", "sharded_optimizers"),
    *("gan_loop turns", "gan_loop parts"),
)
HEAVY = {
    "trl": "trl.trainer.sft_trainer",
    "lightning": "lightning.pytorch",
    "deepspeed": "torch._inductor.compile_fx",  # for which its Muon asks
}
"""What takes every rank seconds to import, by package."""

MICRO = ("--gradient_accumulation_steps", "2")


@pytest.fixture(scope="module")
def field():
    return load_benchmark("field")


@pytest.fixture(scope="module")
def assets(field, folder):
    field.make_assets(folder)
    return folder


def import_heavy(package):
    warnings.simplefilter("ignore")
    importlib.import_module(HEAVY[package])


def run_watched(field, script, folder, run_dir):
    words = [word.replace("{}", str(folder)) for word in script.words]
    command = ["run", "--run-dir", str(run_dir), *(["-m"] if script.module else []), *words]
    prepare = partial(import_heavy, script.package) if script.package in HEAVY else None
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    return field.Outcome(*run_on_ranks(2, command, folder, prepare=prepare, **variables))


@pytest.mark.parametrize("name", QUICK)
def test_what_is_recorded_is_what_the_script_logs(field, assets, tmp_path, name):
    (script,) = (one for one in field.ALL if one.name == name)
    if name.startswith("trl"):
        script = replace(script, words=(*script.words, *MICRO))
    watched = run_watched(field, script, assets, tmp_path / "run")
    assert watched.exit_code == 0, watched.errors
    row = field.Row(name, script.package, (0, watched.exit_code), same_output=True)
    row = field.with_record(row, script, watched, tmp_path / "run")
    assert row.steps[0] == row.steps[1] + script.unseen >= field.STEPS
    assert row.apart <= 1
    assert [found for found in row.findings if not found.startswith(str(Severity.NOTE))] == []
