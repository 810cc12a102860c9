"""``rankscope run`` with a pipeline that is written by hand, on real ranks."""

import numpy as np
import pytest
import torch

from integrations.run_commands import RUN, SCRIPTS
from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from rankscope.verdict.assessment import assess
from support.forked_ranks import run_on_ranks


@pytest.mark.ranks
def test_each_stage_of_a_pipeline_by_hand_is_watched_and_none_waits_for_another(tmp_path):
    script = str(SCRIPTS / "train_pipeline.py")
    places = [tmp_path / "plain", tmp_path / "watched"]
    for place in places:
        place.mkdir()
    command = [*RUN[3:], "--run-dir", str(tmp_path / "run"), script]
    plain = run_on_ranks(4, [script], SCRIPTS, script=True, TRAINED=str(places[0]))
    watched = run_on_ranks(4, command, SCRIPTS, TRAINED=str(places[1]))
    assert (plain[0], watched[0]) == (0, 0), (plain, watched)
    for rank in range(4):
        one, other = (torch.load(place / f"{rank}.pt") for place in places)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name, ranks in {"run": [0, 2], "run-from-rank-1": [1, 3]}.items():
        run = Run.open(tmp_path / name)
        assert (run.status, run.info["job"]["ranks"]) == ("complete", ranks)
        assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(6))
        assert assess(run).severity is None


@pytest.mark.ranks
@pytest.mark.parametrize(
    "words", [(), ("own",), ("sum",)], ids=["by all", "by its own", "of a sum"]
)
def test_a_pipeline_that_clips_by_the_norm_of_one_stage_is_found(tmp_path, words):
    script = str(SCRIPTS / "train_stages.py")
    command = [*RUN[3:], "--run-dir", str(tmp_path / "run"), "--verify-at", "4", script, *words]
    code, out, err = run_on_ranks(4, command, SCRIPTS)
    assert code == 0, err
    found = {}
    for name in ("run", "run-from-rank-1"):
        run = Run.open(tmp_path / name)
        assert run.status == "complete"
        found[name] = [f for f in run.findings() if f.severity > Severity.NOTE]
    losses = run.columns(Table.WORKERS, "loss", "loss_weight", "grad_scale")
    assert np.isfinite(losses["loss"]).all()
    [line] = [line for line in out.splitlines() if "losses" in line]
    of_micro = np.array(line.split("losses")[1].split(), float).reshape(-1, 2)
    _, recorded_TW = run.per_worker("loss")
    np.testing.assert_allclose(recorded_TW[:, 0], of_micro.mean(axis=1), rtol=1e-5)
    if "sum" not in words:
        assert set(losses["loss_weight"].tolist()) == {8.0}  # of both micro-batches
    expected = ["clip-norm-of-stage"] if "own" in words else []
    assert [f.id for f in found["run-from-rank-1"]] == expected
    assert [f.id for f in found["run"]] == expected
    notes = " ".join(f.explanation for f in run.findings())
    assert "as clipping does" in notes
