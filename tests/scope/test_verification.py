"""Reference steps inside trainings on real ranks: what they tell, and that they leave no trace."""

import random
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from rankscope.evidence.reference import probe as verification
from rankscope.evidence.update import audit
from support import deepspeed_modes
from support.findings import events_of
from support.loops import bits_of, collect_warnings, watch
from support.models import TinyLM, make_batch
from support.ranks import run_ranks

AT, STEPS = 1, 3
LOCAL = {"local_buffers": True}

SAYS = {
    # what a loop does: what is found, how bad, and a part of the sentence
    "bfloat16": ("verify.agrees", "note", "ulp of bfloat16"),
    "clips by value": ("verify.agrees", "note", "clipped by value after the reduction"),
    "two passes apart": ("verify.declined", "note", "made of several reductions"),
    "loss outside": ("verify.agrees", "note", "which is computed outside of the model, was"),
    "loss outside, over workers": ("verify.scale", "error", "averaged over the workers twice"),
    "penalised": ("verify.agrees", "note", "each with 4 micro-batches"),
    "penalised inside": ("verify.declined", "note", "of the forward pass that the model does"),
    "divided twice": ("verify.scale", "error", "as if averaged over the workers twice"),
    "weighted": ("verify.weighting", "error", "weights the micro-batches of rank 1 1.9 times"),
    "ignored": ("verify.parameters", "error", "in hidden.bias alone: not reduced"),
    "changed": ("verify.parameters", "error", "in head.weight alone: by"),
    "hidden generator": ("verify.declined", "note", "does not repeat itself"),
    "asks on one": ("verify.declined", "note", "not asked for on all ranks in the same step"),
    "sharded, mixed": ("verify.agrees", "note", "ulp of bfloat16"),
    "sharded, sums": ("verify.agrees", "note", "is what one process would compute (within"),
    "sharded, penalised": ("verify.agrees", "note", "each with 1 micro-batch"),
    "sharded, penalised in shares": ("verify.declined", "note", "past the model's outputs, and"),
    "sharded, passes an object": ("verify.declined", "note", "tuples and dicts of these can."),
    "sharded, asks on one": ("verify.declined", "note", "1 of 2 ranks had come"),
    "ZeRO 1 bf16 accumulate 2": ("verify.agrees", "note", "ulp of bfloat16"),
    "ZeRO 3 all sharded": ("verify.agrees", "note", "each with 2 micro-batches"),
}
ACCUMULATES = {"penalised", "weighted", "changed", "sharded, mixed"}


class Headless(TinyLM):
    """Leaves the loss to the loop."""

    def forward(self, input_ids):
        hidden = self.hidden(self.dropout(self.embedding(input_ids)))
        return self.head(self.norm(hidden.flatten(0, 1)).relu())


class Off:
    """An argument that is False, and no value that can be kept."""

    __slots__ = ("kept",)

    def __bool__(self):
        return False


class Loop:
    def __init__(self, rank, kind, run_dir):
        self.rank, self.kind = rank, kind
        self.sharded = kind.startswith("sharded")
        seed(0)
        model = Headless() if kind.startswith("loss outside") else TinyLM()
        self.model = model.bfloat16() if kind == "bfloat16" else model
        model.hidden.register_forward_hook(self._keep_inner)
        self.wrapped = self._wrap(model)
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(100 + rank)
        options = {"plan": LOCAL, "verify_at": () if "asks" in kind else [AT]}
        self.watched = watch(self.wrapped, self.optimizer, run_dir=run_dir, **options)

    def _keep_inner(self, _, __, output):
        self.inner = output

    def _wrap(self, model):
        if self.sharded:
            return self._shard(model)
        if self.kind == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, ["hidden.bias"]
            )
        if self.kind == "hidden generator":
            hidden = torch.Generator()
            draw = lambda *_: 1 + 0.1 * torch.rand((), generator=hidden)  # noqa: E731
            model.norm.register_forward_hook(lambda m, a, output: output * draw())
        return DistributedDataParallel(model)

    def _shard(self, model):
        mixed = MixedPrecisionPolicy()
        if self.kind == "sharded, mixed":  # not the batch norm
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model.hidden, mp_policy=mixed)
        whole = fully_shard(model)
        if self.kind == "sharded, sums":
            for part in (model.hidden, whole):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        return whole

    @contextmanager
    def _without_reduction(self):
        if not self.sharded:
            with self.wrapped.no_sync():
                yield
            return
        self.wrapped.set_requires_gradient_sync(False)
        yield
        self.wrapped.set_requires_gradient_sync(True)

    def train(self):
        with self.watched as self.scope:
            for step in range(STEPS):
                self._step(step, ask="asks" in self.kind and step == AT - 1 and self.rank == 0)

    def _step(self, step, *, ask):
        if self.kind == "two passes apart":
            self._step_apart(step)
            return
        count = 4 if self.kind in ACCUMULATES else 1
        for micro in range(count):
            last = micro == count - 1
            with nullcontext() if last else self._without_reduction():
                loss = self._loss(make_batch(self.rank, step * count + micro), count)
                loss.backward()
            if self.kind.startswith("loss outside") and self.scope is not None:
                over_workers = self.kind.endswith("over workers")
                self.scope.loss(loss.detach() * (dist.get_world_size() if over_workers else 1))
            if ask and self.scope is not None:
                self.scope.verify()
        with torch.no_grad():
            self._change()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _step_apart(self, step):
        """Apply what the reduced gradients of two passes make together, as in PCGrad."""
        apart = []
        for number in range(2):
            self._loss(make_batch(self.rank, 2 * step + number), 1).backward()
            apart.append([p.grad.clone() for p in self.wrapped.parameters()])
            self.optimizer.zero_grad()
        for parameter, one, other in zip(self.wrapped.parameters(), *apart, strict=True):
            product = min((one * other).sum(), 0.0)
            parameter.grad = one + other - product / other.square().sum().clamp(1e-9) * other
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, batch, count):
        if self.kind.startswith("loss outside"):
            logits = self.wrapped(batch["input_ids"])
            found = F.cross_entropy(logits, batch["labels"].flatten())
        elif self.kind == "sharded, passes an object":
            found = self.wrapped(**batch, use_branch=Off())["loss"]
        else:
            found = self.wrapped(**batch)["loss"]
        if "penalised" in self.kind:
            found = found + 0.1 * self._penalty()
        if self.kind in ("divided twice", "sharded, sums", "loss outside, over workers"):
            found = found / dist.get_world_size()
        if self.kind == "weighted" and self.rank == 1:
            found = found * 1.9
        return found / count

    def _penalty(self):
        if self.kind == "penalised inside":
            return self.inner.square().mean()
        if self.sharded:
            layer = self.model.hidden  # of which this rank holds a part by now
            shares = layer.weight.square().sum()
            return shares.full_tensor() if "shares" in self.kind else layer(torch.ones(1, 24)).sum()
        return self.model.head.weight.square().sum()

    def _change(self):
        if self.kind == "clips by value":
            nn.utils.clip_grad_value_(self.wrapped.parameters(), 0.001)
        if self.kind == "changed":
            self.model.head.weight.grad[3] *= 1.5


def train_each(rank, folder):
    verification.AGREE_SECONDS = audit.AGREE_SECONDS = 0.5  # for a rank that never comes
    told = {}
    for kind in SAYS:
        warnings = collect_warnings()
        if kind.startswith("ZeRO"):
            trained = [train_engine(rank, kind, run_dir) for run_dir in (f"{folder}/{kind}", None)]
            told[kind] = warnings, trained[0] == trained[1]
            continue
        bits = []
        for run_dir in (f"{folder}/{kind}", None):
            loop = Loop(rank, kind, run_dir)
            seed(7 + rank)
            loop.train()
            bits.append(bits_of(loop.model, [loop.optimizer]))
        told[kind] = warnings, SAYS[kind][1] == "error" or bits[0] == bits[1]
    return told


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def train_engine(rank, kind, run_dir):
    (mode,) = (mode for mode in deepspeed_modes.MODES if mode.name == kind)
    engine = deepspeed_modes.make_engine(rank, mode, dropout=0.1)
    with watch(engine, run_dir=run_dir, verify_at=[AT], plan=LOCAL):
        for step in range(STEPS):
            deepspeed_modes.train_step(rank, mode, step, engine)
    state = deepspeed_modes.state_of(engine)
    engine.destroy()
    dist.barrier()
    return state


def findings(run_dir, family):
    return [event for event in events_of(run_dir) if event["cause"].startswith(family)]


@pytest.mark.ranks
@pytest.mark.slow
def test_each_loop_is_judged_rightly_and_goes_on_with_the_same_bits(tmp_path):
    prepare = deepspeed_modes.import_deepspeed
    told = run_ranks(train_each, 2, str(tmp_path), timeout=300, prepare=prepare)
    for kind, (cause, severity, sentence) in SAYS.items():
        (finding,) = findings(tmp_path / kind, "verify.")
        assert (finding["cause"], finding["severity"]) == (cause, severity), finding["explanation"]
        assert sentence in finding["explanation"]
        assert finding["first_step"] == AT
        if severity == "note":
            assert findings(tmp_path / kind, "sync.changed_later") == []
        for warnings, same in (of_rank[kind] for of_rank in told):
            assert warnings == []
            assert same
        assert report(tmp_path / kind) == (1 if severity == "error" else 0)


def report(run_dir):
    """Return the exit code of a report, whose new diagnosis keeps what no table holds."""
    from rankscope.cli.main import app  # which no rank needs to import

    said = CliRunner().invoke(app, ["report", str(run_dir), "--again", "--no-html"])
    assert "only in findings.jsonl" not in said.output
    return said.exit_code
