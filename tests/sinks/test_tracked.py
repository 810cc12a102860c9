"""What a run takes over from the tracker's run that the training has open."""

import os

import pytest

from rankscope import Run
from rankscope.sinks.tracked import open_run_of
from rankscope.verdict.words import facts
from support.loops import Loop
from support.ranks import run_ranks


def test_nothing_is_taken_over_without_a_sink_or_a_run():
    assert open_run_of([]) == {}
    assert open_run_of(["jsonl", "webhook to example.org"]) == {}


def begin(rank, folder):
    """Watch beside an open run of Weights & Biases, and beside one of MLflow."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    assert open_run_of(["wandb", "mlflow"]) == {}
    import mlflow
    import wandb

    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    described = {"group": "seeds", "tags": ["a", "b"], "notes": "see https://me:pw@example.org/x"}
    run = wandb.init(project="p", name="first try", **described) if rank == 0 else None
    for name in ("wandb", "mlflow"):
        if name == "mlflow" and rank == 0:
            run.finish()
            mlflow.start_run(run_name="second try", tags={"stage": "dev"}, description="why")
        loop = Loop(rank, f"{folder}/beside-{name}", sinks=name)
        loop.step(0)
        loop.close()
    if rank == 0:
        mlflow.end_run()
    return loop.warnings


@pytest.mark.ranks
def test_name_group_tags_and_notes_are_those_of_the_open_run(tmp_path):
    assert run_ranks(begin, 2, str(tmp_path)) == [[], []]
    info = Run.open(tmp_path / "beside-wandb").info
    tracked = info["tracked"]
    assert tracked.pop("notes").startswith("see https://")
    assert "pw" not in str(info)
    assert tracked == {
        "tracker": "wandb", "name": "first try", "group": "seeds", "tags": ["a", "b"]
    }  # fmt: skip
    shown = dict(facts(info, "complete", 2, 1))
    assert (shown["Run in wandb"], shown["Group"], shown["Tags"]) == ("first try", "seeds", "a, b")
    assert Run.open(tmp_path / "beside-mlflow").info["tracked"] == {
        "tracker": "mlflow", "name": "second try", "tags": ["stage=dev"], "notes": "why"
    }  # fmt: skip
