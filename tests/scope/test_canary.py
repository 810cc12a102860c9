import random
import shlex

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rankscope import Run
from rankscope.bus.bundles import find_bundles, load_bundle
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from rankscope.evidence.canary import schedule as canary_plan
from rankscope.stats.arrays import MISSING_INT
from rankscope.verdict.assessment import assess
from rankscope.verdict.diagnosis import diagnose_run
from support.loops import Loop, bits_of, collect_warnings, wait_for, watch
from support.models import make_batch
from support.ranks import on_ranks, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LEAD = 6
"""Steps from the decision on a canary to the batches that are kept, and on to the canary itself:
with the usual 16, all that follows would be the same with more steps."""

EVERY, STEPS = 13, 27  # two canaries on schedule: decided at 0 and 13, run at 12 and 25


def hasten():
    """Let canaries of this rank's process come after fewer steps."""
    canary_plan.LAG = canary_plan.FIRST_KEPT = LEAD


class SideEffects(nn.Module):
    """Dropout, batch norm, checkpointing, and a forward pass that changes all that it can reach."""

    def __init__(self, raises):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50)
        self.teacher = nn.Linear(16, 50).requires_grad_(False)
        self.noise = torch.Generator()
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(3))
        self.calls, self.lengths, self.last = 0, [], None
        self.raises = raises

    def forward(self, input_ids, labels):
        self.counter += 1
        self.replaced = self.replaced * 0.5 + torch.rand(3) + random.random() + np.random.rand()  # noqa: NPY002
        self.calls += 1
        self.lengths.append(len(input_ids))
        self.last = input_ids
        if self.raises and not _in_training():
            raise RuntimeError("this model is peculiar")
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        hidden = self.norm(self.dropout(self.embedding(input_ids)).flatten(0, 1))
        hidden = hidden * (1 + 0.1 * torch.rand((), generator=self.noise))
        logits = checkpoint(self.head, hidden, use_reentrant=False)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        return {"loss": loss + 0.1 * (logits - self.teacher(hidden)).square().mean()}


def _in_training():
    return torch.initial_seed() < 1000


def train(rank, run_dir, options):
    warnings = collect_warnings()
    torch.manual_seed(0)
    model, accumulates = SideEffects(options.pop("raises", False)), options.pop("adds", False)
    model.noise.manual_seed(rank)
    ddp = DistributedDataParallel(model, **options.pop("ddp", {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    gradients_kept = []
    with watch(ddp, optimizer, run_dir=run_dir, **options) as scope:
        for step in range(STEPS):
            if accumulates:
                with ddp.no_sync():
                    ddp(**make_batch(rank, step + STEPS))["loss"].backward()
            before = [id(p.grad) for p in model.parameters()]
            output = ddp(**make_batch(rank, step))
            gradients_kept.append(before == [id(p.grad) for p in model.parameters()])
            output["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            wait_for(scope, step - 1)
    return {
        "bits": {
            **bits_of(model, [optimizer]),
            "own": model.noise.get_state().numpy().tobytes(),
            "attributes": (model.calls, model.lengths, model.last.numpy().tobytes()),
        },
        "gradients_kept": gradients_kept,
        "warnings": warnings,
    }


BUCKETS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
WAYS = {
    "bucket views": {"ddp": BUCKETS, "adds": True},
    "static graph": {"ddp": {"static_graph": True}},
    "raises": {"raises": True},
}


def train_all(rank, folder):
    hasten()
    results = {}
    for way, options in WAYS.items():
        alone = train(rank, None, dict(options))
        watched = train(rank, f"{folder}/{way}", {**options, "canary_every": EVERY})
        results[way] = alone, watched
    return results


trained = on_ranks(train_all, 2)


def canary_steps(run):
    steps, of_TW = run.per_worker("canary_of")
    return [int(step) for step, row in zip(steps, of_TW, strict=True) if np.isfinite(row).all()]


@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_same_bits_with_canaries(trained, way):
    ranks, folder = trained
    for alone, watched in (of_rank[way] for of_rank in ranks):
        assert alone["bits"] == watched["bits"]
        assert alone["gradients_kept"] == watched["gradients_kept"]
    assert Run.open(folder / way).status == "complete"
    assert find_bundles(folder / way) == []  # nothing differs, and nobody asked


@pytest.mark.parametrize("way", ["bucket views", "static graph"])
def test_healthy_workers_agree_in_every_bit(trained, way):
    ranks, folder = trained
    assert [of_rank[way][1]["warnings"] for of_rank in ranks] == [[], []]
    run = Run.open(folder / way)
    assert canary_steps(run) == [2 * LEAD, EVERY + 2 * LEAD]
    columns = run.columns(Table.WORKERS, "step", "canary_digest", "canary_again")
    for step in canary_steps(run):
        here = columns["step"] == step
        digests = {*columns["canary_digest"][here], *columns["canary_again"][here]}
        assert len(digests) == 1
        assert MISSING_INT not in digests
    assert not [finding for finding in run.findings() if finding.id.startswith("canary")]


def test_a_model_that_cannot_replay_is_left_alone(trained):
    ranks, folder = trained
    assert canary_steps(Run.open(folder / "raises")) == []
    for of_rank in ranks:
        [warning] = of_rank["raises"][1]["warnings"]  # of two canaries on schedule
        assert "no canary for scheduled" in warning
        assert "this model is peculiar" in warning
        assert "[traceback]" not in warning
    assert "this model is peculiar" in why_none(Run.open(folder / "raises"))
    assert "unmeasured" in Run.open(folder / "static graph").info
    assert Run.open(folder / "static graph").info["unmeasured"] == {}


def why_none(run):
    [waiting] = [text for text in assess(run).statements if "no canary has run yet: " in text]
    return waiting.partition("no canary has run yet: ")[2]


def hold_gradients(rank, run_dir):
    """Train with gradients of the step before in place as a forward pass begins."""
    hasten()
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run_dir=run_dir) as scope:
        for step in range(5 * LEAD):
            draw = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(2, 4, generator=draw)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wait_for(scope, step - 1)


def test_why_no_canary_ran_is_on_record(tmp_path):
    run_ranks(hold_gradients, 2, str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    assert canary_steps(run) == []
    why = why_none(run)
    assert why.startswith("rank ")
    assert " could not run it: gradients are held when the forward pass begins" in why


def differ(rank, run_dir, what):
    """Train with something wrong on rank 1; ask for a canary while the books of step 4 are open."""
    hasten()
    loop = Loop(rank, run_dir)
    if rank == 1 and what == "hardware":
        loop.model.head.register_forward_hook(lambda head, args, output: output * 1.01)
    if rank == 1 and what == "random":
        noise = np.random.default_rng()  # which nobody seeds or restores
        unsteady = lambda head, args, output: output * (1 + 0.1 * noise.random())  # noqa: E731
        loop.model.head.register_forward_hook(unsteady)
    for step in range(30):
        if step == 5 and (what != "one asks" or rank == 1):
            loop.scope.canary()
        loop.step(step)
        wait_for(loop.scope, step - 1)
    loop.close()
    return loop.warnings, [finding.to_json() for finding in loop.scope.findings]


@pytest.mark.parametrize(
    ("what", "num_ranks", "expected"),
    [
        ("hardware", 3, ("canary-differs", "compute.worker_outlier", "error", [1])),
        ("hardware", 2, ("canary-inconclusive", "inconclusive", "warning", [0, 1])),
        ("random", 3, ("canary-nondeterministic", "compute.nondeterministic", "warning", [1])),
        ("one asks", 2, None),
    ],
)
def test_what_a_canary_tells(tmp_path, what, num_ranks, expected):
    results = run_ranks(differ, num_ranks, str(tmp_path / "run"), what)
    run = Run.open(tmp_path / "run")
    told = [f for f in run.findings() if f.id.startswith("canary")]
    assert told == [f for f in diagnose_run(run) if f.id.startswith("canary")]
    for warnings, findings in results:
        assert [f for f in findings if f["id"].startswith("canary")] == [
            finding.to_json() for finding in told
        ]
        assert len(warnings) == (what == "one asks" and warnings == results[0][0])
    if expected is None:
        assert told == []
    else:
        [found] = told
        assert (found.id, found.cause, str(found.severity), list(found.ranks)) == expected
    bundles = find_bundles(run.path)
    if what == "one asks":
        assert bundles == []
        return
    found_bundles = {bundle.reason: bundle for bundle in map(load_bundle, bundles)}
    assert sorted(found_bundles) == ["asked-for", "scheduled"]  # by default, and after it
    for bundle in found_bundles.values():
        assert (bundle.suspect, bundle.peer, bundle.num_workers) == (0, 1, num_ranks)
        for rank, batch in enumerate(bundle.batches):
            given = make_batch(rank, bundle.step)
            assert batch.arrays[0].tolist() == given["input_ids"].tolist()
            assert batch.arrays[1].tolist() == given["labels"].tolist()
        assert list(bundle.verdict.ranks) == expected[3]


FAULTY, FIRST = 2, 20


def bad_labels(rank, run_dir):
    """Train to repeat the input; from one step on, one rank's labels are other tokens."""
    hasten()
    told = []
    loop = Loop(rank, run_dir, on_finding=told.append)
    seen = None
    for step in range(70):
        batch = make_batch(rank, step)
        off = 7 if rank == FAULTY and step >= FIRST else 0
        targets = (batch["input_ids"] + off) % 50
        batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], targets)
        loop.ddp(**batch)["loss"].backward()
        loop.update()
        wait_for(loop.scope, step - 1)
        if seen is None and any(finding.severity >= Severity.WARNING for finding in told):
            seen = step
    loop.close()
    return seen, loop.warnings, [finding.to_json() for finding in loop.scope.findings]


def test_a_worker_with_bad_labels_has_bad_data_and_nothing_else(tmp_path):
    results = run_ranks(bad_labels, 4, str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    recorded = [finding.to_json() for finding in run.findings()]
    assert recorded == [finding.to_json() for finding in diagnose_run(run)]
    for seen, warnings, findings in results:
        assert (warnings, findings) == ([], recorded)
        assert FIRST < seen < FIRST + 30
    by_id = {finding.id: finding for finding in run.findings()}
    outlier = next(f for f in by_id.values() if f.cause == "data.worker_outlier")
    canary = by_id["canary-data"]
    assert (canary.cause, str(canary.severity)) == ("data.worker_outlier", "note")
    assert outlier.ranks == canary.ranks == (FAULTY,)
    assert abs(outlier.first_step - FIRST) <= 3
    assert "loss" in outlier.explanation
    assert canary.evidence["same_bits"] is True
    assert len(set(canary.evidence["losses"])) == len(set(canary.evidence["peer_losses"])) == 1
    [path] = find_bundles(run.path)
    assessed = assess(run)
    assert assessed.recommendation.startswith(
        f"The canary agrees: the difference is in the data of rank {FAULTY}, or in what its loop "
        "does with the loss. Look at the batch of"
    )
    assert "another worker" not in assessed.recommendation
    assert shlex.split(assessed.command) == ["rankscope", "replay", str(path)]
    from typer.testing import CliRunner  # which no rank needs to import

    from rankscope.cli.main import app

    shown = CliRunner().invoke(app, shlex.split(assessed.command)[1:])
    assert shown.exit_code == 0, shown.output
    bundle = load_bundle(path)
    assert bundle.finding.ranks == (FAULTY,)
    assert (bundle.suspect, bundle.peer) == (FAULTY, 3)
    assert bundle.verdict.exact
    given = make_batch(FAULTY, bundle.step)
    assert bundle.batches[0].arrays[0].tolist() == given["input_ids"].tolist()
    masked = given["labels"] < 0
    wrong = (given["input_ids"] + 7) % 50
    assert bundle.batches[0].arrays[1].tolist() == torch.where(masked, -100, wrong).tolist()
