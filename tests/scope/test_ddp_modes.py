"""Every way of using DDP: what real ranks record, against an oracle; and the same bits as alone."""

import threading

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, watch
from rankscope.bus.evidence import Table
from rankscope.bus.replicas import TRACE_WIDTH
from rankscope.gradients.digest import digest_tensor
from support import modes
from support.loops import Loop, collect_warnings
from support.models import make_batch
from support.ranks import alone_and_watched, on_ranks, run_ranks
from support.recorded import SKETCH_NORM_ERROR, WIDTH, Recorded

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS = 4
OTHERS = ("plain", "bucket views", "no_sync", "unused parameters")
"""Modes whose hooks are those of a harder one."""

ALL = [mode for mode in modes.MODES + modes.MORE_MODES if mode.name not in OTHERS]
PARTS = {"first part": range(1, 3), "second part": range(3, 4)}
"""Steps of the third training that are watched, by the ends of their runs' names."""


def train_in_modes(rank, folder):
    """Train in each mode alone, watched, and watched in parts in the tier without sketches."""
    warnings = collect_warnings()
    results = {mode.name: _train(rank, mode, f"{folder}/{mode.name}") for mode in ALL}
    assert warnings == []
    return results


def _train(rank, mode, run_dir):
    alone = modes.Training(rank, mode)
    for step in range(STEPS):
        alone.step(step)
    watched = modes.Training(rank, mode, run_dir, sketch_width=WIDTH, reduced="sketch")
    result = {"truth": [], "reduced_norm": [], "grad_scale": []}
    for step in range(STEPS):
        result["truth"].append(watched.oracle(step))
        result["grad_scale"].append(watched.multiplier)
        result["reduced_norm"].append(watched.step(step))
    watched.close()
    in_parts = modes.Training(rank, mode)
    untouched = what_is_there(in_parts)
    for step in range(STEPS):
        for name, part in PARTS.items():
            if step == part.start:
                in_parts.watch(f"{run_dir} {name}", tier="scalars")
        in_parts.step(step)
        if any(step == part.stop - 1 for part in PARTS.values()):
            in_parts.close()
            assert what_is_there(in_parts) == untouched, mode.name
    return {**result, "bits": [each.state() for each in (alone, watched, in_parts)]}


def what_is_there(training):
    hooks = [training.ddp._forward_pre_hooks, training.ddp._forward_hooks]
    hooks.append(training.optimizer._optimizer_step_post_hooks)
    for parameter in training.model.parameters():
        hooks += [parameter._post_accumulate_grad_hooks, parameter._backward_hooks]
    threads = [thread.name for thread in threading.enumerate() if "rankscope" in thread.name]
    shadow = DistributedDataParallel._match_all_reduce_for_bwd_pass
    return [[len(registered or ()) for registered in hooks], threads, shadow]


class ModeRun(Recorded):
    def __init__(self, ranks, folder, mode):
        self.ranks, self.mode, self._folder = [rank[mode.name] for rank in ranks], mode, folder
        super().__init__(Run.open(folder / mode.name), [rank["truth"] for rank in self.ranks])
        self.overflowed_TW[modes.POISONED_STEP, 1] = mode.scaler

    def check_bits(self):
        for rank in self.ranks:
            alone, *watched = rank["bits"]
            assert watched == [alone] * 2

    def check_spreads_and_losses(self):
        losses_TW, norms_TW = self.truth("loss"), self.truth("norm")
        np.testing.assert_allclose(self.per_worker("loss"), losses_TW, rtol=1e-6)
        close = {"rtol": 1e-4, "atol": 1e-9}
        np.testing.assert_allclose(self.column("loss_std"), losses_TW.std(axis=1), **close)
        found_T = self.column("grad_norm_std")
        for step in self.steps:
            fine_W = ~self.overflowed_TW[step]
            np.testing.assert_allclose(found_T[step], norms_TW[step, fine_W].std(), **close)

    def check_parts(self):
        learns = self.mode.checkpoint == "shared reentrant"
        for name, steps in PARTS.items():
            run = Run.open(self._folder / f"{self.mode.name} {name}")
            assert run.status == "complete"
            observed_T = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
            assert observed_T.tolist() == [not learns, *[True] * (len(steps) - 1)]
            for row, step in enumerate(steps):
                fine_W = ~self.overflowed_TW[step] & observed_T[row]
                norms_W = run.per_worker("grad_norm")[1][row]
                exact_W = self.truth("norm")[step]
                np.testing.assert_allclose(norms_W[fine_W], exact_W[fine_W], rtol=1e-6)
                self.check_directions(run, row, step, known=bool(fine_W.all()))

    def check_directions(self, run, row, step, *, known):
        """Hold the weighted cosine against the gradients: three workers have no other."""
        weighted = run.columns(Table.STEPS, "cosine_weighted")["cosine_weighted"][row]
        assert np.isnan(run.per_worker("cosine_rest")[1][row]).all()
        if known and not self.mode.hook:
            np.testing.assert_allclose(weighted, self.weighted_cosine(step), atol=1e-6)

    def check_micro_batches(self):
        assert self.per_worker("loss_weight").tolist() == self.truth("tokens").tolist()
        rows = self.run.columns(Table.MICRO, "step", "rank", "micro", "loss_weight")
        several = self.mode.accumulate if self.mode.accumulate > 1 else 0
        assert len(rows["step"]) == several * STEPS * len(self.ranks)
        for step, rank, micro, weight in zip(*rows.values(), strict=True):
            labels = modes.micro_batches(int(rank), int(step), self.mode)[micro]["labels"]
            assert weight == (labels != -100).sum()
        self.check_micro_norms()

    def check_scale_and_skipped_steps(self):
        expected_TW = np.array([rank["grad_scale"] for rank in self.ranks]).T
        np.testing.assert_allclose(self.per_worker("grad_scale"), expected_TW, rtol=1e-6)
        skipped = self.mode.scaler * (np.arange(STEPS) == modes.POISONED_STEP)
        calls = [[1 - skip] * len(self.ranks) for skip in skipped.tolist()]
        assert self.per_worker("optimizer_steps").tolist() == calls
        nonfinite_TW = self.per_worker("nonfinite").astype(bool)
        assert nonfinite_TW.tolist() == self.overflowed_TW.tolist()
        assert all(finding.severity != "error" for finding in self.run.findings())

    def check_reduction(self):
        """Hold the reduced gradient against the mean, or against what a hook makes of it."""
        fine = self.fine_steps()
        expected = np.array(self.ranks[0]["reduced_norm"])[fine]
        np.testing.assert_allclose(self.column("grad_norm_reduced")[fine], expected, rtol=1e-6)
        residuals = self.column("reduction_residual")
        for step in self.steps:
            gradients = self.gradients(step)
            mean = gradients.mean(axis=0)
            if self.overflowed_TW[step].any():
                assert not np.isfinite(residuals[step])
            elif self.mode.hook == "rounding":
                hooked = to_bfloat16(gradients).mean(axis=0)
                exact = np.linalg.norm(hooked - mean) / np.linalg.norm(mean)
                np.testing.assert_allclose(residuals[step], exact, rtol=4 * SKETCH_NORM_ERROR)
                np.testing.assert_allclose(np.linalg.norm(hooked), expected[step], rtol=1e-6)
            elif self.mode.hook == "PowerSGD" and step >= 2:
                assert residuals[step] > 0.01
            else:
                assert residuals[step] < 1e-5


def to_bfloat16(values):
    return torch.from_numpy(values).float().bfloat16().double().numpy()


in_modes = on_ranks(train_in_modes, 3, timeout=240.0)


@pytest.fixture(scope="module")
def runs(in_modes):
    return {mode.name: ModeRun(*in_modes, mode) for mode in ALL}


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_a_mode_is_measured_as_it_is_and_keeps_its_bits(runs, mode):
    run = runs[mode.name]
    # How often a shared parameter's hook is called is learnt in the first step.
    first = 1 if mode.checkpoint == "shared reentrant" else 0
    assert run.steps.tolist() == list(range(first, STEPS))
    assert run.run.status == "complete"
    run.check_bits()
    run.check_norms()
    run.check_spreads_and_losses()
    run.check_reduction()
    run.check_groups()
    run.check_micro_batches()
    run.check_scale_and_skipped_steps()
    run.check_parts()


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_workers_that_hold_the_same_are_not_said_to_differ(runs, mode):
    """The model normalises batches: its buffers do differ, and so may the random overflow."""
    expected = {"state.buffers_differ", "numerics.nonfinite", "loss.scale"}
    if mode.hook in ("rounding", "PowerSGD"):  # which the audit tells, of all workers
        expected.add("numerics.reduction_error")
    found = {f.cause: f.explanation for f in runs[mode.name].run.findings()}
    assert not [words for cause, words in found.items() if cause not in expected]


def test_cosines_err_as_theory_says(runs):
    by_mode = [run.cosine_errors() for run in runs.values()]
    assert all(len(errors) >= 3 for errors in by_mode)
    errors = np.concatenate([errors.ravel() for errors in by_mode])
    assert np.abs(errors).max() <= 4 / WIDTH**0.5
    assert np.sqrt(np.mean(errors**2)) <= 1.25 / WIDTH**0.5


# Traces -----------------------------------------------------------------------------------------

TRACED_STEPS = 5
WAYS = {
    "plain": {},
    "micro-batches": {},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}},
    "unused": {"branch": True, "ddp": {"find_unused_parameters": True}},
    "every second step": {"every": 2},
}


def train(rank, way, run_dir):
    traced = {"trace": True} if run_dir else {}
    loop = Loop(rank, run_dir, **WAYS[way], **traced)
    seen = []

    def see(step, kind):
        for name, parameter in loop.model.named_parameters():
            tensor = parameter.grad if kind == "reduced" else parameter
            if tensor is not None:
                norm = float(tensor.detach().double().norm())
                seen.append((step, kind, name, int(digest_tensor(tensor)), norm))

    see(-1, "parameter")
    for step in range(TRACED_STEPS):
        if way == "micro-batches":
            with loop.ddp.no_sync():
                loop.forward(10 + step).backward()
        branch = {"use_branch": step % 2 == 0} if way == "unused" else {}
        loss = loop.ddp(**make_batch(rank, step), **branch)["loss"]
        loss.backward()
        see(step, "reduced")
        loop.update()
        see(step, "parameter")
    loop.close()
    assert loop.warnings == []
    return {"seen": seen, "bits": loop.bits()}


trained = alone_and_watched(train, WAYS, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_holds_what_the_training_held_and_changes_no_bit(trained, way):
    ranks, folder = trained
    for alone, traced in (rank[way] for rank in ranks):
        assert traced["bits"] == alone["bits"]
    every = WAYS[way].get("every", 1)
    seen = [row for row in ranks[0][way][1]["seen"] if row[0] < 0 or row[0] % every == 0]
    rows = Run.open(folder / way).table(Table.TRACES).to_pylist()
    rows = [row for row in rows if row["kind"] != "buffer"]
    found = {(r["step"], r["kind"], r["name"]): (r["digest"], r["norm"]) for r in rows}
    assert len(found) == len(rows)
    assert found.keys() == {row[:3] for row in seen}
    for step, kind, name, digest, norm in seen:
        assert found[step, kind, name] == (digest, pytest.approx(norm, rel=1e-6))
    assert {len(row["sketch"]) for row in rows} == {TRACE_WIDTH}


def train_two_parts(rank, folder):
    torch.manual_seed(0)
    body = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    parts = [DistributedDataParallel(part) for part in (body, torch.nn.Linear(4, 4))]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    with watch(parts, optimizer, run_dir=folder):
        for _ in range(12):
            parts[1](parts[0](torch.randn(2, 4, generator=draw))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_two_parts_of_one_loss_are_measured_in_every_step(tmp_path):
    """A backward pass begins in the part whose output is not the first one's."""
    run_ranks(train_two_parts, 2, str(tmp_path / "run"))
    assert Run.open(tmp_path / "run").columns(Table.STEPS, "observed")["observed"].all()
