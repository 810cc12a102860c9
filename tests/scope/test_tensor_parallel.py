from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import sum_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from rankscope import Run
from rankscope.evidence.reference import probe as verification
from rankscope.evidence.update import audit
from rankscope.verdict.diagnosis import diagnose_run
from support.findings import events_of
from support.fsdp2_modes import Block
from support.loops import bits_of, collect_warnings, train_watched, watch
from support.ranks import on_ranks, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


ALONE = "in layers.1.norm.weight alone: not reduced over tp."

MOVED = "all 4 ranks ran the training's own forward pass"
SAYS = {
    # what a training does: what is found, how bad, and a part of the sentence
    "sequence, mixed, accumulates": ("verify.agrees", "note", "each worker's mean loss counts"),
    "norm forgotten": ("verify.parameters", "error", ALONE),
    "lost, mixed": ("verify.micro_batches", "error", "lacks micro-batch 1 of every worker."),
    "heads by hand, cut logits": ("verify.agrees", "note", MOVED),
    "heads by hand, cut logits in context": ("verify.declined", "note", "raises RuntimeError"),
    "one asks": ("verify.declined", "note", "after 0 s, 2 of 4 ranks had come"),
}
AT = 1
"""Which step's gradient is computed again."""


WIDTH, TOKENS, LENGTH = 32, 96, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(F.silu(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.RMSNorm(WIDTH)
        self.gives_loss = False

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if isinstance(logits, DTensor) and not self.gives_loss:
            return {"logits": logits}
        return {"loss": loss_of_tokens(logits, ids), "logits": logits}


def loss_of_tokens(logits, ids):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def cut_over_tp(net, tp, sequence, logits):
    """Cut layers, and sequences between them: not, in torch's style, or norms by hand."""
    begin, end = {}, {}
    if sequence:
        begin = {"input_layouts": Shard(1)}
        end = {"output_layouts": Shard(1), "use_local_output": False}
    plan = {"up": ColwiseParallel(**begin), "down": RowwiseParallel(**end)}
    if sequence == "style":
        plan["norm"] = SequenceParallel()
    for layer in net.layers:
        parallelize_module(layer, tp, plan)
        if sequence == "by hand":
            part = {"desired_input_layouts": Shard(1), "use_local_output": True}
            parallelize_module(layer.norm, tp, PrepareModuleInput(input_layouts=Shard(1), **part))
            back = PrepareModuleOutput(desired_output_layouts=Shard(1), **end)
            parallelize_module(layer.norm, tp, back)
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **end),
        "head": ColwiseParallel(**begin, **logits),
    }
    parallelize_module(net, tp, outer | ({"norm": SequenceParallel()} if sequence else {}))


class Training:
    def __init__(self, kind, run_dir):
        self.kind = kind
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.worker = dist.get_rank() // 2
        self.count = 2 if "accumulates" in kind or "lost" in kind else 1
        self.model = self._shard()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        at = () if kind == "one asks" and dist.get_rank() % 2 else [AT]
        self.watched = watch(self.model, self.optimizer, run_dir=run_dir, verify_at=at)

    def _shard(self):
        sequence = "style" if self.kind.startswith("sequence") else ""
        if "by hand" in self.kind or "forgotten" in self.kind:
            sequence = "by hand"
        options = {"mesh": self.mesh["dp"]}
        if "mixed" in self.kind:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        torch.manual_seed(0)
        net = Net()
        if "heads" in self.kind:
            for layer in net.layers:
                layer.down.register_forward_pre_hook(self._count_heads)
        logits = {"output_layouts": Replicate()}
        if "cut logits" in self.kind:
            logits = {"output_layouts": Shard(-1), "use_local_output": False}
        net.gives_loss = "in context" in self.kind
        cut_over_tp(net, self.mesh["tp"], sequence, logits)
        for layer in net.layers:
            fully_shard(layer, **options)
        return fully_shard(net, **options)

    def _count_heads(self, module, args):
        args[0].view(2, LENGTH, 4 // self.mesh["tp"].size(), WIDTH // 2)

    def train(self):
        with self.watched:
            for step in range(AT + 1):
                for micro in range(self.count):
                    last = micro == self.count - 1
                    self.model.set_requires_gradient_sync(last or "lost" in self.kind)
                    self._backward(step * self.count + micro, forgets="lost" in self.kind and last)
                self._change()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return bits_of(self.model, [self.optimizer])

    def _backward(self, number, *, forgets):
        draw = torch.Generator().manual_seed(1000 * self.worker + number)
        ids = torch.randint(TOKENS, (2, LENGTH), generator=draw)
        with loss_parallel() if "cut logits" in self.kind else nullcontext():
            given = self.model(ids)
            cut = "cut logits" in self.kind
            found = loss_of_tokens(given["logits"], ids) if cut else given["loss"]
            if forgets:
                self.optimizer.zero_grad()
            (found / self.count).backward()

    def _change(self):
        if "by hand" in self.kind or "forgotten" in self.kind:
            last = ("1.norm",) if "norm forgotten" not in self.kind else ()
            sum_parts(self.model, ("0.norm", *last), self.mesh["tp"].get_group())


def train_each(rank, folder):
    told = {}
    for kind in SAYS:
        warnings = collect_warnings()
        verification.AGREE_SECONDS = audit.AGREE_SECONDS = 0.4 if kind == "one asks" else 30.0
        torch.manual_seed(7 + rank // 2)
        watched = Training(kind, f"{folder}/{kind}/run").train()
        torch.manual_seed(7 + rank // 2)
        wrong = SAYS[kind][1] == "error"
        told[kind] = warnings, wrong or watched == Training(kind, None).train()
    return told


def verifications(run_dir):
    return [event for event in events_of(run_dir) if event["cause"].startswith("verify.")]


@pytest.mark.ranks
@pytest.mark.slow
def test_each_training_is_judged_rightly_and_goes_on_with_the_same_bits(tmp_path):
    told = run_ranks(train_each, 4, str(tmp_path), timeout=300)
    for kind, (cause, severity, sentence) in SAYS.items():
        runs = sorted((tmp_path / kind).iterdir())
        assert len(runs) == 2  # one for each rank along tp
        if kind == "one asks":
            assert verifications(runs.pop()) == []
        for run in runs:
            (finding,) = verifications(run)
            told_of = kind, finding["explanation"]
            assert (finding["cause"], finding["severity"]) == (cause, severity), told_of
            assert sentence in finding["explanation"], told_of
            assert finding["first_step"] == AT
        for warnings, same in (of_rank[kind] for of_rank in told):
            assert warnings == []
            assert same, kind


# Clipping ---------------------------------------------------------------------------------------

STEPS, NARROW, LIMIT = 12, 8, 0.01


def clip(model, mesh, twice, step):
    """Clip by the norm over both axes; ``twice`` counts what ranks along tp hold alike for each."""
    total = torch.zeros(())
    for parameter in model.parameters():
        names, placements = parameter.device_mesh.mesh_dim_names, parameter.placements
        cut = "tp" in names and isinstance(placements[names.index("tp")], Shard)
        square = parameter.grad.to_local().square().sum()
        total += square if cut or twice else square / mesh["tp"].size()
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(min(1.0, LIMIT / float(total.sqrt())))


def train_clipped(rank, run_dir, twice, same_data=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(NARROW), nn.Linear(NARROW, NARROW))
    parallelize_module(model[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(step):
        torch.manual_seed(2 * step + (0 if same_data else mesh["dp"].get_local_rank()))
        batch = torch.randn(4, NARROW)
        return (model(batch) - batch.flip(1)).square().mean()

    clipped = partial(clip, model, mesh, twice)
    train_watched(model, optimizer, run_dir, STEPS, loss_of, clipped)


def train_all_clipped(rank, folder):
    train_clipped(rank, f"{folder}/twice/run", True)
    train_clipped(rank, f"{folder}/once/run", False, same_data=True)


clipped = on_ranks(train_all_clipped, 4)


@pytest.mark.parametrize("name", ["twice", "once"])
def test_a_norm_over_a_mesh_is_found_only_if_it_is_wrong(clipped, name):
    runs = (Run.open(path) for path in (clipped[1] / name).iterdir())
    found = {f.id: f for run in runs for f in run.findings()}
    if name == "once":
        assert not any(finding.cause == "sync.clip_norm" for finding in found.values())
        return
    finding = found["clip-norm-over-mesh:tp"]
    assert finding.cause == "sync.clip_norm"
    assert "all ranks along tp hold alike count once for each of these ranks" in finding.explanation
    assert finding.evidence["norm"] == pytest.approx(LIMIT, rel=1e-4)


def test_workers_are_named_by_their_ranks_in_the_job(clipped):
    for name, words in {"run": "Ranks 0 and 2 ", "run-from-rank-1": "Ranks 1 and 3 "}.items():
        run = Run.open(clipped[1] / "once" / name)
        for findings in (run.findings(), diagnose_run(run)):
            [found] = [one for one in findings if one.id == "data.duplicate_batches"]
            assert found.explanation.startswith(words)
            assert found.ranks == (0, 1)
