"""Several GPUs over NCCL: same bits, step ratio, six faults, a hang; one block for an issue.

Start it with ``make gpu GPU_FLAGS='--parts nccl'`` on one host with 2 to 8 GPUs, or with
``sbatch examples/cluster/nccl.sbatch`` on two hosts. It takes less than ten minutes, installs
nothing, and prints its answers at the end, also where a part has failed. ``--dry-run`` does the
same over gloo on the CPU, with a tiny model.

Each rank of ``torchrun`` runs this file. The hang comes last: the last rank leaves out a
collective, the others wait in it, and after a while every rank ends by itself.
"""

import argparse
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # before torch: its Flight Recorder

import torch
import torch.distributed as dist
from gpu_common import Setup, Spread
from gpu_page import DDP_WAYS
from gpu_steps import _time_both
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run, version

STEPS = 96
LATE = "other labels on one rank"
"""The only fault that so many steps are needed for: a dry run takes fewer for the others."""
HANG_SECONDS = 10.0
_LOOK_SECONDS = 90
_MORE_SECONDS = 20  # until the stacks and the Flight Recorder are read
_SHOWN = 3

FAULTS = {
    "other parameters on one rank": "state.parameters_differ",
    "the same samples on two ranks": "data.duplicate_batches",
    "no reduction": "sync.not_reduced",
    "an infinite gradient on one rank": "numerics.nonfinite",
    "a layer's gradient changed on one rank": "sync.gradients_differ",
    LATE: "data.worker_outlier inconclusive",  # the latter of two ranks
}
"""Faults, and the causes of which some finding should name one."""


class _Model(nn.Module):
    """A classifier of a few layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.layers(inputs))
        return logits


def _train(setup: Setup, steps: int, run_dir: str | None, fault: str = "") -> str:
    """Train for some steps, watched or not; return a digest of this rank's parameters."""
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    model = _Model(setup.pick(2048, 32)).to(setup.device)
    devices = None if setup.dry else [setup.device.index]
    ddp = DistributedDataParallel(model, device_ids=devices)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    rule = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    seed = rank - 1 if last and fault == "the same samples on two ranks" else rank
    draws = torch.Generator().manual_seed(100 + seed)
    if last and fault == "other parameters on one rank":
        with torch.no_grad():
            model.head.bias[0] += 1e-3
    scope = None
    if run_dir is not None:
        scope = rankscope.watch(ddp, optimizer, run_dir=run_dir, overhead_budget=None)
    for step in range(steps):
        inputs = torch.randn(32, 64, generator=draws)
        labels = (inputs @ rule).argmax(1)
        if last and fault == LATE:
            labels = labels.roll(1)
        with ddp.no_sync() if fault == "no reduction" else nullcontext():
            loss = nn.functional.cross_entropy(
                ddp(inputs.to(setup.device)), labels.to(setup.device)
            )
            if last and step == 8 and fault == "an infinite gradient on one rank":
                loss = loss * float("inf")
            if scope is not None:
                scope.loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        if last and fault == "a layer's gradient changed on one rank":
            assert model.head.weight.grad is not None
            model.head.weight.grad *= 1.01
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    content = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def _same_bits(setup: Setup, folder: str) -> str:
    mine = _train(setup, 20, None), _train(setup, 20, f"{folder}/bits")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    same = sum(alone == watched for alone, watched in every)
    return f"{same} of {len(every)} ranks"


def _ratio(setup: Setup, folder: str) -> str:
    times = _time_both(setup, DDP_WAYS[-1])
    if not times:
        return ""
    ratio, plain = Spread.of(times["ratio"]), Spread.of([1e3 * s for s in times["plain"]])
    return (
        f"{ratio.value:.4f} (95 %: {ratio.low:.4f} to {ratio.high:.4f}) of {plain.value:.1f} ms; "
        f"{100 * times['observed']:.0f} % of steps observed; the host {1e3 * times['own']:.2f} ms"
    )


def _fault(setup: Setup, folder: str, fault: str) -> str:
    run_dir = f"{folder}/{fault.replace(' ', '-').replace(chr(39), '')}"
    _train(setup, STEPS if fault == LATE else setup.pick(STEPS, 16), run_dir, fault)
    dist.barrier()
    if dist.get_rank():
        return ""
    found = [f for f in Run.open(run_dir).findings() if f.severity > rankscope.Severity.NOTE]
    named = [f"{f.id} {f.severity} of ranks {', '.join(map(str, f.ranks))}" for f in found]
    right = any(f.cause in FAULTS[fault].split() for f in found)
    return f"{'found' if right else 'NOT FOUND'}: {'; '.join(named[:_SHOWN]) or 'no finding'}"


def _attempt(name: str, work: Callable[..., str], *args: Any) -> str:
    """Return an answer; of a failure its last line. Other ranks may then wait for this one."""
    start = time.monotonic()
    try:
        answer = work(*args)
    except Exception as error:
        traceback.print_exc()
        answer = f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    if dist.get_rank() == 0:
        print(f"[{name}] {answer} ({time.monotonic() - start:.0f} s)", flush=True)
    return answer


def _hang(setup: Setup, folder: str, end: Callable[[str], None]) -> None:
    """Have the last rank leave out a collective; ``end`` gets the answer, and ends the rank."""
    run_dir = f"{folder}/hang"
    torch.manual_seed(0)
    model = _Model(32).to(setup.device)
    devices = None if setup.dry else [setup.device.index]
    ddp = DistributedDataParallel(model, device_ids=devices)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    rankscope.watch(ddp, optimizer, run_dir=run_dir, hang_seconds=setup.pick(HANG_SECONDS, 3.0))
    last = dist.get_rank() == dist.get_world_size() - 1

    def look() -> None:
        answer = f"NOT FOUND in {_LOOK_SECONDS} s"
        limit = time.monotonic() + _LOOK_SECONDS
        known = False
        while time.monotonic() < limit and "Flight Recorder" not in answer:
            time.sleep(1)
            found = [f for f in _findings(run_dir) if f.cause == "time.hang"]
            if found:
                answer = f"found: {found[-1].explanation}"
                limit = limit if known else time.monotonic() + _MORE_SECONDS
                known = True
        end(answer)

    for step in range(24):
        if step == 20:
            threading.Thread(target=look, daemon=True).start()
            if last:
                time.sleep(120)
        ddp(torch.randn(8, 64, device=setup.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _findings(run_dir: str) -> list[Any]:
    try:
        return list(Run.open(run_dir).findings())
    except rankscope.RankscopeError:
        return []


def _block(setup: Setup, answers: dict[str, str]) -> str:
    """Return the answers as one block of Markdown."""
    backend = str(dist.get_backend())
    if not setup.dry:
        nccl: Any = torch.cuda.nccl
        backend += " " + ".".join(map(str, nccl.version()))
    device = "CPU" if setup.dry else torch.cuda.get_device_name()
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    facts = (
        f"rankscope {version.__version__}, torch {torch.__version__}, {backend}, "
        f"{dist.get_world_size()} ranks on {hosts} host(s), {device}"
    )
    rows = [f"| {name} | {answer} |" for name, answer in answers.items()]
    return "\n".join([f"### {facts}", "", "| what | answer |", "|---|---|", *rows])


def main() -> None:
    """Run all parts on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny, over gloo on the CPU")
    parser.add_argument("--seconds", type=float, default=60, help="to time steps for")
    parser.add_argument("--folder", default="", help="for the runs, which all ranks can read")
    options = parser.parse_args()
    setup = Setup(options.dry_run, options.seconds)
    if not setup.dry:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(setup.pick("nccl", "gloo"), timeout=timedelta(minutes=5))
    shared = [options.folder or mkdtemp(prefix="rankscope-gpus-")]
    dist.broadcast_object_list(shared)
    folder = shared[0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    answers = {"same bits with and without it": _attempt("bits", _same_bits, setup, folder)}
    if dist.get_world_size() > 1:
        answers["step, watched over unwatched"] = _attempt("ratio", _ratio, setup, folder)
    for fault in FAULTS:
        answers[fault] = _attempt(fault, _fault, setup, folder, fault)

    def end(answer: str) -> None:
        answers["a hang, one rank missing"] = answer
        if dist.get_rank() == 0:
            print(f"\nPlease paste this into an issue:\n\n{_block(setup, answers)}\n", flush=True)
            sys.stdout.flush()
        else:
            time.sleep(3)  # rank 0 prints first: torchrun ends all when one has ended
        os._exit(0)  # the rank waits in a collective that never ends

    if dist.get_rank() == 0:
        print(f"[hang] on {socket.gethostname()}, up to 90 s", flush=True)
    _hang(setup, folder, end)
    time.sleep(120)


if __name__ == "__main__":
    main()
