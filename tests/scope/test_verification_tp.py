"""Reference steps of a causal LM under FSDP2 and tensor parallelism, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from rankscope.evidence.reference import probe as verification
from rankscope.evidence.update import audit
from support.findings import events_of
from support.loops import collect_warnings, watch
from support.ranks import run_ranks

ALONE = "in model.layers.1.input_layernorm.weight alone: not reduced over tp."

MOVED = "all 4 ranks ran the training's own forward pass"
SAYS = {
    # what a training does: what is found, how bad, and a part of the sentence
    "sequence, mixed, accumulates": ("verify.agrees", "note", "each worker's mean loss counts"),
    "norm forgotten": ("verify.parameters", "error", ALONE),
    "lost, mixed": ("verify.micro_batches", "error", "lacks micro-batch 1 of every worker."),
    "heads by hand": ("verify.agrees", "note", MOVED),
    "one asks": ("verify.declined", "note", "after 0 s, 2 of 4 ranks had come"),
}
AT = 1
"""Which step's gradient is computed again."""


class Training:
    def __init__(self, kind: str, run_dir: str | None) -> None:
        from support import parallel_llama  # transformers, in ranks alone

        self.llama, self.kind = parallel_llama, kind
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.worker = dist.get_rank() // 2
        self.count = 2 if "accumulates" in kind or "lost" in kind else 1
        self.model = self._shard()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scope: Any = None
        if run_dir is not None:
            at = () if kind == "one asks" and dist.get_rank() % 2 else [AT]
            self.scope = watch(self.model, self.optimizer, run_dir=run_dir, verify_at=at)

    def _shard(self) -> Any:
        sequence = "style" if self.kind.startswith("sequence") else ""
        if "by hand" in self.kind or "forgotten" in self.kind:
            sequence = "by hand"
        options: dict[str, Any] = {}
        if "mixed" in self.kind:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = self.llama.make_llama()
        if self.kind == "heads by hand":
            for layer in model.model.layers:
                layer.self_attn.o_proj.register_forward_pre_hook(self._count_heads)
        return self.llama.shard(model, self.mesh, sequence=sequence, **options)

    def _count_heads(self, module: Any, args: Any) -> None:
        heads = 4 // self.mesh["tp"].size()
        args[0].view(2, self.llama.LENGTH, heads, 8)

    def train(self) -> list[bytes]:
        """Return all bits afterwards."""
        for step in range(AT + 1):
            for micro in range(self.count):
                last = micro == self.count - 1
                self.model.set_requires_gradient_sync(last or "lost" in self.kind)
                batch = self.llama.make_batch(self.worker, step * self.count + micro)
                self._backward(batch, forgets="lost" in self.kind and last)
            self._change()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scope is not None:
            self.scope.close()
        moments = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        tensors = [*self.model.parameters(), *moments]
        local = [tensor.to_local().detach().contiguous() for tensor in tensors]
        bits = [tensor.view(torch.uint8).numpy().tobytes() for tensor in local]
        return [*bits, torch.get_rng_state().numpy().tobytes()]

    def _backward(self, batch: dict[str, Tensor], *, forgets: bool) -> None:
        found = self.model(**batch).loss
        if forgets:
            self.optimizer.zero_grad()
        (found / self.count).backward()

    def _change(self) -> None:
        forgotten = ""
        if "norm forgotten" in self.kind:
            forgotten = "1.input"
        if "by hand" in self.kind or "forgotten" in self.kind:
            self.llama.sum_norms(self.model, self.mesh["tp"], but=forgotten)


def train_each(rank: int, folder: str) -> dict[str, Any]:
    """Train each kind; return warnings, and whether one that is not wrong has its own bits."""
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


def import_llama() -> None:
    from support import parallel_llama  # noqa: F401


def verifications(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in events_of(run_dir) if event["cause"].startswith("verify.")]


@pytest.mark.ranks
@pytest.mark.slow
def test_each_training_is_judged_rightly_and_goes_on_with_the_same_bits(tmp_path):
    told = run_ranks(train_each, 4, str(tmp_path), timeout=300, prepare=import_llama)
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
