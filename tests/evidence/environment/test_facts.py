import json
import math
import os
import platform
import subprocess

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.files import to_plain
from rankscope.verdict.diagnosis import diagnose_run
from rankscope.wrappers import facts as worker_facts
from rankscope.wrappers.datasets import draws_with_replacement
from rankscope.wrappers.find import find_wrapper
from rankscope.wrappers.loop import LOOP
from rankscope.wrappers.optimizers import JointOptimizer
from rankscope.wrappers.wrapped import Wrapped, trained_in
from support.loops import Loop
from support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "HF_", "TORCH_", "CUDA_", "LOCAL_RANK")):
            monkeypatch.delenv(name)


def test_versions_and_flags_are_told_in_plain_values():
    facts = worker_facts.environment_facts(CPU)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["deterministic_algorithms"] is False
    assert facts["device"]
    assert json.loads(json.dumps(facts)) == facts


def test_variables_that_decide_how_a_job_computes_are_told(monkeypatch):
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MY_OWN", "3")
    monkeypatch.setenv("RANKSCOPE_RUN_PID", "3")  # of `rankscope run`: another on each worker
    facts = worker_facts.environment_facts(CPU)
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        assert facts[name] == "3"
    assert not {"MY_OWN", "RANKSCOPE_RUN_PID"} & facts.keys()


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "NCCL_AUTHORIZATION", "HF_OF_MY_OWN"])
def test_variables_that_are_not_known_are_never_told(monkeypatch, name):
    monkeypatch.setenv(name, "tell-nobody")
    assert "tell-nobody" not in json.dumps(worker_facts.environment_facts(CPU))


@pytest.mark.parametrize(
    "value",
    [
        "https://me:tell-nobody/and@example.org",
        "https://example.org/?sig=tell-nobody",
        "HTTPS://me:tell@nobody@example.org",
    ],
)
def test_of_an_address_the_host_alone_is_told(monkeypatch, value):
    monkeypatch.setenv("HF_ENDPOINT", value)
    assert worker_facts.environment_facts(CPU)["HF_ENDPOINT"].lower() == "https://example.org/…"


def git(folder, *command):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.check_output(["git", *who, *command], cwd=folder, text=True).strip()


def test_the_source_revision_is_the_commit_and_whether_files_differ(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not part of the source")
    assert worker_facts.source_revision(tmp_path) == {
        "revision": commit,
        "revision_changed": False,
    }
    (tmp_path / "train.py").write_text("lr = 2\n")
    assert worker_facts.source_revision(tmp_path) == {"revision": commit, "revision_changed": True}


def make_model(width=3, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def facts_of(model=None, optimizer=None, loader=None, wrapped=None):
    model = make_model() if model is None else model
    wrapped = wrapped or Wrapped(LOOP, model, trained_in(model), None, None)
    facts = worker_facts.training_facts(wrapped, optimizer, loader, wrapped.group)
    assert json.loads(json.dumps(to_plain(facts))) == to_plain(facts)
    return facts


def test_parameters_are_counted_and_their_layout_has_a_digest():
    facts = facts_of()["parameters"]
    assert facts["tensors"] == 4
    assert facts["elements"] == 4 * 3 + 3 + 3 + 3
    assert (facts["trained_tensors"], facts["trained_elements"]) == (3, 4 * 3 + 3 + 3)
    assert facts["types"] == {"float32": 4}
    assert facts_of()["parameters"] == facts
    others = [make_model(4), make_model(dtype=torch.bfloat16), make_model().requires_grad_()]
    for other in (*others, nn.Sequential(make_model())):
        assert facts_of(other)["parameters"]["layout"] != facts["layout"]


def test_every_setting_of_the_optimizer_has_its_name():
    model = make_model()
    groups = [{"params": [model[0].weight], "lr": torch.tensor(0.5)}, {"params": model[1].weight}]
    groups[0]["max_norm"] = math.inf
    optimizer = torch.optim.AdamW(groups, lr=0.25, betas=(0.8, 0.99), weight_decay=0.125)
    facts = facts_of(model, optimizer)["optimizer"]
    first, second = facts["groups"]
    assert (facts["class"], facts["num_groups"]) == ("torch.optim.adamw.AdamW", 2)
    assert (first["lr"], second["lr"]) == (0.5, 0.25)
    assert (second["betas"], second["weight_decay"], second["tensors"]) == ([0.8, 0.99], 0.125, 1)
    assert (first["max_norm"], "params" in second) == ("inf", False)


def test_parameters_that_an_optimizer_inside_of_another_repeats_count_once():
    model = make_model()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.SGD([model[0].weight], lr=0.1)  # as ZeroRedundancyOptimizer has one
    facts = facts_of(model, JointOptimizer([outer, inner]))["optimizer"]
    assert [group["tensors"] for group in facts["groups"]] == [4]


class Odd:
    def __len__(self):
        raise RuntimeError("no")

    def __getattr__(self, name):
        raise RuntimeError("no")


def test_what_cannot_be_told_is_left_out():
    facts = facts_of(optimizer=Odd(), loader=Odd())
    assert facts["optimizer"] == {}
    assert facts["loader"] == {"class": f"{__name__}.Odd"}
    assert facts_of()["optimizer"] is None
    assert facts_of()["seed"] == torch.initial_seed()


def hooks(rank):
    found = []
    for register in (
        lambda ddp: None,
        lambda ddp: ddp.register_comm_hook(None, sum_up),
        lambda ddp: ddp.register_comm_hook(None, bf16_compress_hook),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    ):
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=2)
        try:
            register(ddp)
        except (TypeError, RuntimeError):  # bfloat16 is refused on some machines
            continue
        found.append(facts_of(wrapped=find_wrapper(ddp))["reduction"])
    return found


def sum_up(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.ranks
def test_the_reduction_names_its_hook():
    [found] = run_ranks(hooks, 1)
    first, second, *_ = found
    assert first == {
        "class": "DistributedDataParallel",
        "backend": "gloo",
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
        "static_graph": False,
        "bucket_bytes": 2 * 2**20,
        "hook": None,
    }
    assert second["hook"].endswith("sum_up")
    assert "fp16" in found[-1]["hook"].lower()


DATA = list(range(12))
NUM_SHARDS, SHARD, BATCH = 12, 24, 6


class ResampledShards(data.IterableDataset):
    """Names of shards, drawn with replacement, as webdataset's class of this name does."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        while True:
            yield int(self.rng.integers(NUM_SHARDS))


class Pipeline(data.IterableDataset):
    """A source and what is done to it, as webdataset's ``DataPipeline`` has it."""

    def __init__(self, *stages) -> None:
        self.pipeline = list(stages)

    def __iter__(self):
        return (shard * SHARD + sample for shard in self.pipeline[0] for sample in range(SHARD))


class RepeatedAugmentation(data.DistributedSampler):
    num_repeats = 3


def test_loaders_that_draw_with_replacement_are_recognised():
    again = data.RandomSampler(DATA, replacement=True)
    resampled = Pipeline(ResampledShards(0), str)
    for loader in (
        data.DataLoader(DATA, sampler=again),
        data.DataLoader(DATA, sampler=data.WeightedRandomSampler([1.0] * 12, 12)),
        data.DataLoader(DATA, batch_sampler=data.BatchSampler(again, 3, drop_last=True)),
        data.DataLoader(DATA * 100, batch_sampler=data.BatchSampler(again, 3, drop_last=True)),
        data.DataLoader(resampled, batch_size=BATCH),
        Pipeline(data.DataLoader(resampled, batch_size=None)),
        data.DataLoader(data.ChainDataset([resampled])),
        data.DataLoader(DATA, sampler=RepeatedAugmentation(DATA, 2, 0)),
    ):
        assert draws_with_replacement(loader)


def test_other_loaders_are_not():
    class Odd:
        @property
        def dataset(self):
            raise ValueError("not yet")

    itself = Odd()
    itself.sampler = itself
    for loader in (
        None,
        3,
        DATA,
        itself,
        data.DataLoader(DATA, shuffle=True),
        data.DataLoader(DATA, sampler=data.DistributedSampler(DATA, 2, 0)),
        data.DataLoader(DATA, sampler=data.WeightedRandomSampler([1.0] * 12, 3, replacement=False)),
        data.DataLoader(Pipeline(range(3))),
    ):
        assert not draws_with_replacement(loader)


def train_on_shards(rank, folder):
    for tell in (True, False):
        loader = data.DataLoader(Pipeline(ResampledShards(rank)), batch_size=BATCH)
        known = {"loader": loader} if tell else {}
        loop = Loop(rank, f"{folder}/{tell}", plan={}, tier="scalars", **known)
        for step, ids in zip(range(32), loader, strict=False):
            loop.scope.batch(ids.tolist())
            loop.step(step)
        loop.close()


def test_whole_shards_drawn_again_are_no_fault_once_the_loader_is_known(tmp_path):
    run_ranks(train_on_shards, 2, str(tmp_path))
    for tell in (True, False):
        run = Run.open(tmp_path / str(tell))
        assert [rank["with_replacement"] for rank in run.info["ranks"]] == [tell] * 2
        severities = [f.severity for f in run.findings() if f.cause == "data.overlapping_shards"]
        assert severities == [Severity.NOTE if tell else Severity.ERROR]
        assert diagnose_run(run) == tuple(run.findings())
