"""``watch`` under every wrapper and tier: what four or two real ranks record, against an oracle.

The taps have tests of their own in every mode; here is the way from the model to the record.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support import deepspeed_modes as zero
from support.models import make_batch, make_model
from support.ranks import run_ranks

STEPS, WIDTH, RANKS = 3, 1021, 4
WRAPPERS = ["DDP", "replicate", "FSDP2", "replicate by FSDP2", "HSDP"]
CASES = [*((wrapper, "sketch") for wrapper in WRAPPERS), ("DDP", "scalars"), ("FSDP2", "scalars")]


def wrap(kind):
    model = make_model(dropout=0.0)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "replicate":
        return replicate(model)
    if kind == "replicate by FSDP2":
        return replicate_with_fsdp(model, mesh=init_device_mesh("cpu", (RANKS,)))
    if kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.embedding, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parameters_of(model):
    named = getattr(model, "module", model).named_parameters()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named
    }


def local_gradient(parameters, batch):
    alone = make_model(dropout=0.0)
    alone.load_state_dict({**alone.state_dict(), **parameters})
    alone(**batch)["loss"].backward()
    return {name: p.grad.double().flatten().numpy() for name, p in alone.named_parameters()}


def train(rank, folder):
    """Train under every wrapper and tier; return each rank's own gradients by case and step."""
    seen = {}
    for case in CASES:
        wrapper, tier = case
        model = wrap(wrapper)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scope = rankscope.watch(
            model,
            optimizer,
            run_dir=f"{folder}/{wrapper}-{tier}",
            tier=tier,
            sketch_width=WIDTH,
            reduced="norm" if tier == "scalars" else "sketch",
            overhead_budget=None,
        )
        gradients = []
        for step in range(STEPS):
            batch = make_batch(rank, step)
            gradients.append(local_gradient(parameters_of(model), batch))
            model(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        scope.close()
        dist.barrier()
        seen[case] = gradients
    return seen


@pytest.fixture(scope="module")
def recorded():
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train, RANKS, folder, timeout=240)
        yield {
            case: (
                [[rank[case][step] for rank in ranks] for step in range(STEPS)],
                Run.open(Path(folder) / "-".join(case)),
            )
            for case in CASES
        }


def said_to_differ(run):
    """Return what exact evidence says against a job in which nothing is wrong."""
    kinds = ("sync.", "state.parameters", "state.optimizer", "numerics.reduction")
    return [f.explanation for f in run.findings() if f.cause.startswith(kinds)]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_worker_is_said_to_differ(recorded, case):
    assert said_to_differ(recorded[case][1]) == []


def whole(gradients):
    """Return every worker's gradient in one piece ``[W, P]``."""
    return np.stack([np.concatenate(list(each.values())) for each in gradients])


def cosines_of(gradients_WP):
    units = gradients_WP / np.linalg.norm(gradients_WP, axis=1)[:, None]
    return units @ units.T


@pytest.mark.parametrize("case", CASES, ids="-".join)
class TestWhatIsRecorded:
    def test_norms_of_workers_and_of_the_mean(self, recorded, case):
        steps, run = recorded[case]
        _, norms_TW = run.per_worker("grad_norm")
        exact = [np.linalg.norm(whole(step), axis=1) for step in steps]
        np.testing.assert_allclose(norms_TW, exact, rtol=1e-6)
        reduced = run.columns(Table.STEPS, "grad_norm_reduced")["grad_norm_reduced"]
        means = [np.linalg.norm(whole(step).mean(axis=0)) for step in steps]
        np.testing.assert_allclose(reduced, means, rtol=1e-6)

    def test_weighted_cosine(self, recorded, case):
        steps, run = recorded[case]
        recorded_T = run.columns(Table.STEPS, "cosine_weighted")["cosine_weighted"]
        exact = []
        for step in steps:
            gram = whole(step) @ whole(step).T
            norms = np.sqrt(gram.diagonal())
            off = ~np.eye(len(gram), dtype=bool)
            exact.append(gram[off].sum() / np.outer(norms, norms)[off].sum())
        within = 4 / WIDTH**0.5 if case[1] == "sketch" else 1e-6
        np.testing.assert_allclose(recorded_T, exact, atol=within)

    def test_each_worker_against_the_others(self, recorded, case):
        steps, run = recorded[case]
        _, cosines_TW = run.per_worker("cosine_rest")
        if case[1] == "scalars" and case[0] not in ("DDP", "replicate"):
            assert np.isnan(cosines_TW).all()
            return
        within = 6 / WIDTH**0.5 if case[1] == "sketch" else 1e-6
        for cosines_W, step in zip(cosines_TW, steps, strict=True):
            rests = whole(step).sum(axis=0) - whole(step)
            lengths = np.linalg.norm(whole(step), axis=1) * np.linalg.norm(rests, axis=1)
            exact = np.sum(whole(step) * rests, axis=1) / lengths
            np.testing.assert_allclose(cosines_W, exact, atol=within)

    def test_pairs(self, recorded, case):
        steps, run = recorded[case]
        if case[1] == "scalars":
            assert run.table(Table.PAIRS).num_rows == 0
            return
        _, cosines_TWW = run.cosines()
        within = 5 / WIDTH**0.5
        for cosines_WW, step in zip(cosines_TWW, steps, strict=True):
            np.testing.assert_allclose(cosines_WW, cosines_of(whole(step)), atol=within)

    def test_groups(self, recorded, case):
        steps, run = recorded[case]
        rows = run.columns(Table.GROUPS)
        names = list(dict.fromkeys(rows["group"].tolist()))
        assert names == ["embedding", "hidden", "norm", "head"]
        norms = rows["grad_norm"].reshape(STEPS, RANKS, len(names))
        for step in range(STEPS):
            for rank in range(RANKS):
                own = steps[step][rank]
                exact = [
                    np.linalg.norm(np.concatenate([g for n, g in own.items() if n.startswith(m)]))
                    for m in names
                ]
                np.testing.assert_allclose(norms[step, rank], exact, rtol=1e-6)

    def test_the_reduction_is_what_it_should_be(self, recorded, case):
        _, run = recorded[case]
        residual = run.columns(Table.STEPS, "reduction_residual")["reduction_residual"]
        assert np.isnan(residual).all() if case[1] == "scalars" else (residual < 1e-6).all()


def train_zero(rank, folder):
    """Train under DeepSpeed's stages; return the norms of this rank's own gradients."""
    norms = {}
    for stage in range(4):
        mode = zero.Mode(f"ZeRO {stage}", stage)
        engine = zero.make_engine(rank, mode, dropout=0.0)
        norms[stage] = []
        with rankscope.watch(engine, run_dir=f"{folder}/{stage}", overhead_budget=None):
            for step in range(STEPS):
                own = zero.accumulated(mode, zero.micro_gradients(rank, mode, step, engine))
                norms[stage].append(
                    sum(float(g.double().square().sum()) for g in own.values()) ** 0.5
                )
                zero.train_step(rank, mode, step, engine)
        dist.barrier()
    return norms


def test_deepspeed_from_the_engine_to_the_record(tmp_path):
    ranks = run_ranks(train_zero, 2, str(tmp_path), timeout=240, prepare=zero.import_deepspeed)
    for stage in range(4):
        run = Run.open(tmp_path / str(stage))
        assert said_to_differ(run) == []
        _, norms_TW = run.per_worker("grad_norm")
        exact = np.array([rank[stage] for rank in ranks]).T
        np.testing.assert_allclose(norms_TW, exact, rtol=1e-5)
        columns = run.columns(Table.STEPS, "cosine_mean", "grad_norm_reduced")
        assert np.isfinite(columns["cosine_mean"]).all()
        assert np.isfinite(columns["grad_norm_reduced"]).all()
        _, calls_TW = run.per_worker("optimizer_steps")
        assert (calls_TW[:-1] >= 1).all()


def accumulate(rank, folder):
    """Train with micro-batches; return each step's gradient, as one process computes it."""
    model = DistributedDataParallel(make_model(dropout=0.0))
    gradients = []
    with rankscope.watch(model, run_dir=f"{folder}/run", tier="scalars", overhead_budget=None):
        for step in range(STEPS):
            batches = [make_batch(rank, 3 * step + micro) for micro in range(3)]
            parts = [local_gradient(parameters_of(model), batch) for batch in batches]
            gradients.append({name: sum(part[name] for part in parts) / 3 for name in parts[0]})
            for micro, batch in enumerate(batches):
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    (model(**batch)["loss"] / 3).backward()
            model.zero_grad()
    return gradients


def test_scalars_are_exact_under_accumulation(tmp_path):
    ranks = run_ranks(accumulate, 2, str(tmp_path))
    run = Run.open(tmp_path / "run")
    found = run.columns(Table.STEPS, "cosine_weighted", "grad_norm_std")
    rest_TW = run.per_worker("cosine_rest")[1]  # of two, the pair's
    np.testing.assert_array_equal(rest_TW, found["cosine_weighted"][:, None].repeat(2, axis=1))
    steps = [whole([rank[step] for rank in ranks]) for step in range(STEPS)]
    exact = [cosines_of(step)[0, 1] for step in steps]  # of one pair, weighted or not
    np.testing.assert_allclose(found["cosine_weighted"], exact, atol=1e-6)
    spreads = [np.linalg.norm(step, axis=1).std() for step in steps]
    np.testing.assert_allclose(found["grad_norm_std"], spreads, rtol=1e-5)


def refused(rank, folder):
    model = fully_shard(make_model())
    messages = []
    for options in (
        {"tier": "exact"},
        {"tier": "everything"},
        {"tier": "scalars", "reduced": "off"},
        {"groups": 3},
    ):
        with pytest.raises(rankscope.RankscopeError) as error:
            rankscope.watch(model, run_dir=f"{folder}/run", **options)
        messages.append(str(error.value))
    return messages


def test_what_cannot_work_is_refused_in_one_sentence(tmp_path):
    messages = run_ranks(refused, 1, str(tmp_path))[0]
    exact, tier, scalars, groups = messages
    assert exact.startswith("the tier 'exact' was removed: use tier='sketch'")
    assert "rankscope.fixed_order(model)" in exact
    assert "tier must be one of 'scalars', 'sketch', got 'everything'" in tier
    assert "the scalars tier reads reduced='norm', got 'off'" in scalars
    assert "groups must be" in groups
    assert not (tmp_path / "run").exists()
