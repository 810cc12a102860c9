import numpy as np
import pytest
import torch
from torch import nn

from numerics import diff_runs
from numerics.diff_runs import Training, flip, nothing, write_training
from rankscope.bus.environment import precision_digest
from rankscope.evidence.parity.probe import ParityRecorder, RecordPlace
from rankscope.tools.diff import DiffClass, Stage, compare_runs
from rankscope.wrappers.facts import precision_flags


def decayed(first, lr=0.06):
    return lambda step: lr if step >= first else 0.05


def scaled(factor, moment, first=0):

    def touch(step, now, tensors):
        for value in tensors.values() if step >= first and now == moment else ():
            np.multiply(value, np.float32(factor), out=value)

    return touch


COARSE = scaled(1 + 2**-9, "reduced", first=2)
LRS = (0.05, 0.1)
TRACES = pytest.mark.parametrize("traced", [True, False], ids=["traces", "no traces"])


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return write_training(tmp_path_factory.mktemp("diff") / "base", Training())


def compare(base, path, *, traced=True, **changes):
    return compare_runs(base, write_training(path / "other", Training(traced=traced, **changes)))


def compare_both(path, a, b):
    return compare_runs(write_training(path / "a", a), write_training(path / "b", b))


def where(comparison):
    assert comparison.parting is not None
    return comparison.parting.step, comparison.parting.stage


@TRACES
@pytest.mark.parametrize(
    ("changes", "kind", "place", "words"),
    [
        ({}, DiffClass.IDENTICAL, None, "10 common steps"),
        ({"order": (3, 1, 0, 2)}, DiffClass.ROUNDING, (0, Stage.GRADIENT), "order"),
        ({"data": 1}, DiffClass.DATA, (0, Stage.SAMPLES), ""),
        ({"seed": 1}, DiffClass.STATE, (0, Stage.START), ""),
        ({"lr": decayed(6)}, DiffClass.CONFIGURATION, (6, Stage.SETTINGS), ""),
    ],
    ids=["nothing", "order", "data", "initialisation", "learning rate"],
)
def test_what_differs_is_told_with_class_and_step(
    base, tmp_path, traced, changes, kind, place, words
):
    found = compare(base, tmp_path, traced=traced, **changes)
    assert (found.kind, found.identical) == (kind, kind is DiffClass.IDENTICAL)
    if place == (0, Stage.START) and not traced:
        place = (0, Stage.LOSS)
    assert (found.parting and where(found)) == place
    assert words in found.headline
    assert "lr" not in changes or "lr: 0.05 in A, 0.06 in B" in found.causes
    if traced and kind is DiffClass.ROUNDING:
        assert 0.3 <= found.parting.relative / found.parting.predicted <= 3
        assert found.parting.num_tensors == (3, 3)


@pytest.mark.parametrize(
    ("ended", "steps"), [("incomplete", 6), ("complete", 6), ("incomplete", 10)]
)
def test_a_run_that_was_cut_short_is_not_identical(base, tmp_path, ended, steps):
    found = compare(base, tmp_path, steps=steps, ended=ended)
    cut = ended == "incomplete" and steps == 6
    assert found.kind is DiffClass.IDENTICAL
    assert found.identical is found.to_json()["identical"] is not cut
    assert found.headline.endswith("B ended early.") is cut
    assert found.ended_early == (("B",) if cut else ())
    other = compare(base, tmp_path / "reordered", steps=steps, ended=ended, order=(3, 1, 0, 2))
    assert (other.kind, other.ended_early) == (DiffClass.ROUNDING, found.ended_early)
    assert (f"rankscope report {tmp_path / 'other'}" in found.advice) is cut


def test_other_micro_batches_are_a_cause_of_rounding(tmp_path):
    one, two = Training(columns={"micro_batches": 1}), Training(columns={"micro_batches": 2})
    two.order = (3, 1, 0, 2)
    found = compare_both(tmp_path, one, two)
    assert found.kind is DiffClass.ROUNDING
    assert "number of micro-batches: 1 in A, 2 in B" in found.causes


def test_other_workers_on_the_same_global_batch_are_rounding(base, tmp_path):
    found = compare(base, tmp_path, workers=2)
    assert found.kind is DiffClass.ROUNDING
    assert where(found)[0] == 0
    assert found.alignment.num_workers == (4, 2)
    assert found.causes[0] == "number of workers: 4 in A, 2 in B"


@pytest.mark.parametrize("first", [0, 4])
def test_samples_that_are_dealt_to_other_workers_are_different_data(base, tmp_path, first):
    moved = compare(base, tmp_path, deal=lambda s, r: (r + (s >= first)) % 4)
    assert moved.kind is DiffClass.DATA
    assert where(moved) == (first, Stage.SAMPLES)
    words = "dealt to other workers: worker 0 of B has worker 1's"
    assert any(words in told for told in moved.explanation)


@pytest.mark.parametrize(("odd", "same"), [(0, True), (1, False)])
def test_other_losses_of_equal_parameters_are_no_other_state(tmp_path, odd, same):
    """The digests of what both begin with decide; here they say so of other parameters."""
    sides = []
    for seed, rank in ((0, 0), (1, odd)):
        differs = {0: ("started", "optimizer: parameters: bits", rank)}
        sides.append(Training(traced=False, seed=seed, disagreements=differs))
    found = compare_both(tmp_path, *sides)
    assert found.kind is (DiffClass.JUMP if same else DiffClass.STATE)
    assert ("From equal parameters and data" in found.headline) is same
    assert ("the command lines" in found.advice) is same


def record_update(folder, lr):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    recorder = ParityRecorder(layer, RecordPlace(folder), 1)
    rows = torch.ones(4, 3)
    recorder.on_inputs((rows,), {})
    output = layer(rows)
    recorder.on_output(output, {})
    output.square().mean().backward()
    recorder.see_update(optimizer)
    optimizer.step()
    recorder.after_update(optimizer)
    recorder.close()


def test_records_for_parity_name_the_parameters_of_the_step_where_runs_part(base, tmp_path):
    runs = [write_training(tmp_path / str(lr), Training(lr=lambda s, lr=lr: lr)) for lr in LRS]
    assert "the update differs" not in " ".join(compare_runs(*runs).explanation)
    for run, lr in zip(runs, LRS, strict=True):
        record_update(run.path / "parity", lr)
    found = compare_runs(*runs)
    assert where(found) == (0, Stage.SETTINGS)
    words = "In step 0 the update differs, and the gradient does not: all 2 parameters, × 2."
    assert words in found.explanation
    assert not any("update differs" in words for words in compare_runs(base, runs[1]).explanation)


def flipped(name, index, bit, at, moment):
    def touch(step, now, tensors):
        if (step, now) == (at, moment):
            flip(tensors, name, index, bit)

    return touch


@pytest.mark.parametrize("bit", [3, 22, 30])
@pytest.mark.parametrize("moment", ["reduced", "parameter"])
def test_a_flipped_bit_is_found_with_its_tensor(base, tmp_path, bit, moment):
    touch = flipped("layers.0", 17, bit, 5, moment)
    with np.errstate(over="ignore", invalid="ignore"):
        found = compare(base, tmp_path, touch=touch)
    assert found.kind is DiffClass.JUMP
    assert found.parting is not None
    assert found.parting.step == 5
    assert found.parting.tensor == "layers.0"
    assert "layers.0" in found.headline


def write_diverging(path, monkeypatch, **changes):
    """Write a run whose parameters are NaN after step 4, so that its losses are from step 5 on."""

    def touch(step, moment, tensors):
        if (step, moment) == (4, "parameter"):
            tensors["head"][:] = np.nan

    with monkeypatch.context() as patch:
        patch.setattr(diff_runs, "_report", flagged(lambda _, loss: ~np.isfinite(loss)))
        return write_training(path, Training(traced=False, touch=touch, **changes))


def flagged(which):
    plain = diff_runs._report

    def report(step):
        step.workers["nonfinite"][:] = which(step.step, step.workers["loss"])
        return plain(step)

    return report


def test_losses_of_one_run_that_become_nan_are_a_jump(base, tmp_path, monkeypatch):
    later = {"lr": decayed(7, 0.01)}  # a scheduler that sees the NaN
    for name, more in (("b", {}), ("c", later)):
        other = write_diverging(tmp_path / name, monkeypatch, workers=2, **more)
        found = compare_runs(base, other)
        assert found.kind is DiffClass.JUMP
        assert "step 5" in found.headline
        assert any("in step 5 the losses of run B alone" in words for words in found.explanation)
        assert found.jump is not None
        assert (found.jump.step, found.jump.curve) == (5, "loss")
        assert "losses of run A alone" in " ".join(compare_runs(other, base).explanation)


def test_infinite_gradients_that_a_scaler_skips_are_no_jump(base, tmp_path, monkeypatch):
    monkeypatch.setattr(diff_runs, "_report", flagged(lambda step, loss: step == 5))
    found = compare(base, tmp_path, traced=False, workers=2, order=range(2)[::-1])
    assert found.kind is DiffClass.ROUNDING


def test_a_gradient_of_one_worker_gone_wrong_is_a_jump(base, tmp_path):
    def touch(step, rank, gradient):
        if (step, rank) == (4, 1):
            gradient["head"] *= np.float32(1.5)

    found = compare(base, tmp_path, touch_local=touch)
    assert found.kind is DiffClass.JUMP
    assert where(found) == (4, Stage.LOCAL)
    assert found.parting is not None
    assert found.parting.ranks == (1,)


@pytest.mark.parametrize(
    ("changed", "kind"), [({"types": {"bfloat16": 3}}, DiffClass.ROUNDING), ({}, DiffClass.JUMP)]
)
def test_a_coarser_type_explains_a_larger_distance(tmp_path, changed, kind):
    types = {"types": {"float32": 3}}
    one = Training(info={"training": {"parameters": types}})
    other = Training(touch=COARSE, info={"training": {"parameters": {**types, **changed}}})
    found = compare_both(tmp_path, one, other)
    assert found.kind is kind
    assert where(found) == (2, Stage.GRADIENT)


@pytest.mark.parametrize(
    ("autocast", "kind", "named"),
    [("off", DiffClass.JUMP, ()), ("bfloat16", DiffClass.ROUNDING, ("autocast",))],
)
def test_another_library_flag_is_no_other_type(tmp_path, autocast, kind, named):
    """A flag of oneDNN is in the digest of the precision: only autocast explains 0.2 %."""
    sides = []
    for touch, mkldnn, cast in ((nothing, True, "off"), (COARSE, False, autocast)):
        flags = {**precision_flags(), "mkldnn": mkldnn}
        code = precision_digest({"parameter_types": "float32", "autocast": cast, **flags})
        info = {
            "training": {"parameters": {"types": {"float32": 3}}},
            "ranks": [{"rank": rank, "environment": flags} for rank in range(4)],
        }
        sides.append(Training(info=info, touch=touch, columns={"precision": code}))
    found = compare_both(tmp_path, *sides)
    assert found.kind is kind
    assert found.parting.dtype == ("float32" if autocast == "off" else "bfloat16")
    assert tuple(change.name for change in found.changes if change.kind == "dtype") == named
    assert any(change.name == "environment.mkldnn" for change in found.changes)


def test_a_gradient_that_differs_more_than_its_loss_is_no_rounding(tmp_path):
    def scaled(step, rank, gradient):
        for value in gradient.values():
            np.multiply(value, np.float32(1.05), out=value)

    odd = Training(touch_local=scaled, traced=False, loss_factor=1 + 1e-7)
    found = compare_both(tmp_path, Training(traced=False), odd)
    assert found.kind is DiffClass.JUMP
    assert found.headline.startswith("From equal losses, the runs compute other gradients")


@pytest.mark.parametrize("workers", [2, 4])
def test_random_numbers_of_another_division_of_the_batch_are_no_bug(tmp_path, workers):
    """Dropout draws other masks in two micro-batches than in one, and on four workers."""
    one = Training(columns={"rng_used": 4, "micro_batches": 1})
    columns = {"rng_used": 4, "micro_batches": 2 if workers == 4 else 1}
    other = Training(workers=workers, columns=columns, loss_factor=1.01)
    found = compare_both(tmp_path, one, other)
    assert found.kind is DiffClass.CONFIGURATION
    names = [cause.partition(":")[0] for cause in found.causes]
    assert names == ["micro-batches" if workers == 4 else "workers"]
    assert "without dropout" in found.advice


@pytest.mark.parametrize("info", [{}, {"continues": "earlier"}], ids=["new", "continuation"])
def test_another_update_after_equal_losses_is_other_state_only_of_a_continuation(tmp_path, info):
    odd = Training(traced=False, touch=scaled(0.99, "parameter"), loss_factor=1 + 1e-7, info=info)
    found = compare_both(tmp_path, Training(traced=False), odd)
    assert where(found) == (0, Stage.LOSS)
    assert found.kind is (DiffClass.STATE if info else DiffClass.JUMP)
    assert found.headline.startswith("From equal losses, the runs make other") is not bool(info)
