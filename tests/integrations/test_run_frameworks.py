"""``rankscope run`` on an unmodified script with DeepSpeed."""

import importlib
import json
import os
import sys
import warnings

import pytest

from integrations.adapter_runs import assert_same_metrics, metrics
from integrations.run_commands import SCRIPTS, start_on_ranks, watch
from rankscope import Run
from rankscope.bus.evidence import Table
from support.deepspeed_modes import import_deepspeed
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ZERO_2 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500},
}


def import_all():
    warnings.simplefilter("ignore")
    sys.modules["mlflow"] = None  # DeepSpeed would import it, for seconds
    sys.path.insert(0, str(SCRIPTS))
    import_deepspeed()


def references(rank, folder):
    """Train as the scripts do: without a monitor, then with one that is called by hand."""
    os.environ.update(  # as under a launcher
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost"
    )
    os.environ.update(MASTER_PORT="1", OMP_NUM_THREADS="1")
    import_deepspeed(rank)
    script = importlib.import_module("train_deepspeed")

    engine = script.make_engine(config=ZERO_2)
    script.train(rank, engine)
    digest = script.digest(engine.module)
    engine.destroy()
    engine = script.make_engine(config=ZERO_2)
    with watch(engine, None, folder / "deepspeed") as scope:
        script.train(rank, engine, scope.loss)
    engine.destroy()
    return digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run frameworks")


@pytest.fixture(scope="module")
def digests(folder):
    """Return digests of the trainings without a monitor; the runs by hand lie in ``folder``."""
    return run_ranks(references, 2, folder, timeout=240, prepare=import_all)


def assert_silent_but_for_the_end(ended):
    verdict, recorded = [x for x in ended.stderr.splitlines() if x.startswith("rankscope: ")]
    assert "of 2 workers: no fault found" in verdict
    assert recorded.startswith("rankscope: the run is recorded in")


def assert_recorded_as_by_hand(run, reference, steps, *, without=()):
    assert metrics(run).keys() == metrics(reference).keys()
    assert_same_metrics(run, reference, without=without)
    assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(steps))


def import_around_deepspeed():
    sys.modules["mlflow"] = None
    importlib.import_module("torch._inductor.compile_fx")  # its Muon asks for a compiler


def test_a_script_with_deepspeed(folder, digests):
    """What the command waits for is imported after it has begun to wait."""
    run_dir, output, config = folder / "watched deepspeed", folder / "d", folder / "zero 2.json"
    config.write_text(json.dumps(ZERO_2))
    words = ["--output", str(output), "--deepspeed", "--deepspeed_config", str(config)]
    ended = start_on_ranks(
        run_dir,
        SCRIPTS / "train_deepspeed.py",
        *words,
        prepare=import_around_deepspeed,
        DS_ACCELERATOR="cpu",
    )
    assert ended.returncode == 0, ended.stderr
    assert_silent_but_for_the_end(ended)
    for rank in range(2):
        seen = json.loads((folder / f"d.{rank}").read_text())
        assert seen == {"argv": words, "digest": digests[rank]}
    run = Run.open(run_dir)
    assert run.info["options"]["parallel"] == "DeepSpeed"
    assert_recorded_as_by_hand(run, Run.open(folder / "deepspeed"), 6)
    micro = run.columns(Table.MICRO, "loss", "loss_scale")
    assert (micro["loss"] > 1).all()  # not the half that backward is called on
    assert set(micro["loss_scale"]) == {0.5}
