"""A small DDP job with one of eight silent faults, or none, watched by one tool or by none.

``benchmarks/peers.py`` starts it, in the environment of that tool. It reads what to do from the
environment: ``PEERS_TOOL``, ``PEERS_FAULT``, ``PEERS_OUT``, ``PEERS_STEPS``, ``PEERS_WIDTH`` and
``PEERS_SEED``. Ids of faults are those of ``benchmarks/faults/catalogue.toml``.
"""

import itertools
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOOL, FAULT = os.environ["PEERS_TOOL"], os.environ["PEERS_FAULT"]
OUT = Path(os.environ["PEERS_OUT"])
STEPS, WIDTH, SEED = (int(os.environ[f"PEERS_{name}"]) for name in ("STEPS", "WIDTH", "SEED"))
BEGIN, HIT, EVERY, MICRO_BATCHES, CLASSES = 20, 1, 5, 2, 8
RANK = int(os.environ["RANK"])

if TOOL.startswith("traincheck"):
    from traincheck import annotate_stage
    from traincheck.instrumentor import META_VARS
elif TOOL == "msprobe":
    from msprobe.pytorch import TrainerMon
elif TOOL == "rankscope":
    import rankscope
elif TOOL == "adaptdl":
    os.environ["ADAPTDL_REPLICA_RANK"] = os.environ["RANK"]
    os.environ["ADAPTDL_NUM_REPLICAS"] = os.environ["WORLD_SIZE"]
    os.environ["ADAPTDL_MASTER_ADDR"] = "127.0.0.1"
    os.environ["ADAPTDL_MASTER_PORT"] = os.environ["PEERS_PORT"]
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # it makes a store of its own
    import adaptdl.torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.outer(torch.relu(self.inner(self.norm(hidden))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.head(self.blocks(self.enter(inputs)))


def make_data():
    draw = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(2048, 16, generator=draw)
    return TensorDataset(inputs, (inputs @ torch.randn(16, CLASSES, generator=draw)).argmax(1))


def batches(dataset):
    """Yield batches; their size is that of a benchmark's step if the model is wide."""
    size = 8 if WIDTH <= 64 else 64
    if FAULT == "D5":
        draw = torch.Generator().manual_seed(SEED)
        loader = DataLoader(dataset, size, shuffle=True, generator=draw, drop_last=True)
    else:
        seed = SEED + 1000 * RANK if FAULT == "D1" else SEED
        sampler = DistributedSampler(dataset, seed=seed)
        loader = DataLoader(dataset, size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        if FAULT != "D5":
            sampler.set_epoch(epoch)
        yield from loader


def hit(step):
    return RANK == HIT and step >= BEGIN


def spoil(step, inputs, labels):
    if FAULT == "D20" and hit(step):
        wrong = torch.rand(len(labels)) < 0.3
        labels = torch.where(wrong, torch.randint(0, CLASSES, labels.shape), labels)
    return inputs, labels


def context(ddp, step, micro):
    first_syncs = FAULT == "Y4" and step >= BEGIN
    syncs = micro == (0 if first_syncs else MICRO_BATCHES - 1)
    return nullcontext() if syncs else ddp.no_sync()


def after_step(model, optimizer, step):
    if FAULT == "T2" and hit(step) and step == BEGIN:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    if FAULT == "T4" and hit(step + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3


def corrupt(gradient):
    if hit(STEP) and STEP % EVERY == 0:
        gradient = gradient.clone()
        gradient[0, 0] += 2.0
    return gradient


torch.set_num_threads(1)
if TOOL == "adaptdl":
    adaptdl.torch.init_process_group("gloo")
else:
    dist.init_process_group("gloo")
if TOOL.startswith("traincheck"):
    annotate_stage("init")
    META_VARS["_DATA_PARALLEL_RANK"] = str(RANK)
torch.manual_seed(SEED)
model = Classifier()
if FAULT == "N1":
    model.blocks[0].outer.weight.register_hook(corrupt)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(SEED + 1000 * RANK)
seconds, STEP = [], 0

if TOOL == "adaptdl":  # which has a loop of its own, without micro-batches
    ddp = adaptdl.torch.AdaptiveDataParallel(model, optimizer, broadcast_buffers=FAULT != "T10")
    size = (8 if WIDTH <= 64 else 64) * dist.get_world_size() * MICRO_BATCHES
    loader = adaptdl.torch.AdaptiveDataLoader(
        make_data(), batch_size=size, shuffle=True, drop_last=True
    )
    for _epoch in adaptdl.torch.remaining_epochs_until(1 + STEPS // (2048 // size)):
        for batch in loader:
            begun = time.perf_counter()
            optimizer.zero_grad()
            inputs, labels = spoil(STEP, *batch)
            F.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            after_step(model, optimizer, STEP)
            seconds.append(time.perf_counter() - begun)
            STEP += 1
    noise = float(ddp.gns.var_avg() / ddp.gns.sqr_avg())
    (OUT / f"noise-{RANK}.json").write_text(json.dumps(noise))
else:
    ddp = DistributedDataParallel(model, broadcast_buffers=FAULT != "T10")
    if TOOL.startswith("traincheck"):
        annotate_stage("training")
    elif TOOL == "msprobe":
        monitor = TrainerMon(os.environ["PEERS_CONFIG"], params_have_main_grad=False)
        monitor.set_monitor(ddp, grad_acc_steps=MICRO_BATCHES, optimizer=optimizer)
    elif TOOL == "rankscope":
        scope = rankscope.watch(ddp, optimizer, run_dir=OUT / "run", announce=False)
    data = batches(make_data())
    for STEP in range(STEPS):
        begun = time.perf_counter()
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            inputs, labels = spoil(STEP, *next(data))
            with context(ddp, STEP, micro):
                losses = F.cross_entropy(ddp(inputs), labels, reduction="none")
                if TOOL == "rankscope":
                    scope.loss(losses)
                (losses.mean() / MICRO_BATCHES).backward()
        optimizer.step()
        after_step(model, optimizer, STEP)
        seconds.append(time.perf_counter() - begun)
    if TOOL == "rankscope":
        scope.close()
(OUT / f"seconds-{RANK}.json").write_text(json.dumps(seconds))
dist.barrier()
dist.destroy_process_group()
