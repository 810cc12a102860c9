"""The small training to which accidents happen, plain or watched, as one rank runs it.

Ranks are forked from a process that has imported torch; ``torchrun`` starts this file itself.
"""

import argparse
import atexit
import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope

NUM_RANKS = 2
STEPS = 40
STEP_SECONDS = 0.01
"""What a step sleeps, so that accidents can come between two of them."""

PATIENCE = float(os.environ.get("RANKSCOPE_CHAOS_PATIENCE", "1"))
"""Factor on all bounds of time: above 1 where other work keeps the processors busy."""

GROUP_SECONDS = 20.0
_SETTLE_SECONDS = 15.0 * PATIENCE
_LINE = struct.Struct("=qdd")


class Board:
    """What each rank notes of itself in a file that outlives it.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def note(self, rank: int, done: int, began: float, settled: float) -> None:
        """Note steps that have ended, when the first began, and seconds spent waiting for that."""
        _LINE.pack_into(self._memory, rank * _LINE.size, done, began, settled)

    def _read(self, place: int) -> list[Any]:
        return [_LINE.unpack_from(self._memory, r * _LINE.size)[place] for r in range(NUM_RANKS)]

    @property
    def done(self) -> list[int]:
        """Steps that each rank has ended."""
        return self._read(0)

    @property
    def began(self) -> float:
        """The clock's time at which the first rank was ready to train; 0 before."""
        return float(min(self._read(1)))

    @property
    def settled(self) -> float:
        """Seconds for which a rank has waited for its agent at most."""
        return float(max(self._read(2)))


@dataclass(frozen=True)
class Work:
    """What ranks shall do.

    Attributes:
        watched: Options of ``rankscope.watch``, without ``run_dir``; None for a plain training.
        run_dir: Where rank 0 records, below the job's folder if it is relative.
        settles: Whether ranks wait for their agent before the first step.
        sharded: Whether FSDP2 shards the model, in place of DDP.
        same_data: Whether both ranks read the same batches, which is a finding.
        closes: Whether the script closes its scope.
        environment: Variables that are set before the model is watched.
        before: Called with the loop before it is watched.
        act: Called with the loop at the beginning of every step, and once before it closes.
        calls: Calls the model of the loop with the inputs of a step.
    """

    watched: Mapping[str, Any] | None = None
    run_dir: Path = Path("run")
    settles: bool = True
    sharded: bool = False
    same_data: bool = False
    closes: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[["Loop"], None] = lambda loop: None
    act: Callable[["Loop"], None] = lambda loop: None
    calls: Callable[["Loop", Tensor], Any] = lambda loop, inputs: loop.model(inputs)


class Loop:
    """One rank's training.

    Args:
        rank: The rank.
        folder: Where the job lies.
        work: What to do.

    Attributes:
        step: The step that begins; STEPS before it closes.
        scope: The monitor; None in a plain training.
        noted: What a training has noted of itself, which counts among its bits.
    """

    def __init__(self, rank: int, folder: Path, work: Work) -> None:
        self.rank, self.folder, self.work = rank, folder, work
        self.step = 0
        self.noted: list[Any] = []
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.model: Any = self.module
        if work.sharded:
            fully_shard(self.module, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
        else:
            self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        os.environ.update(work.environment)
        work.before(self)
        self.scope: Any = None
        if work.watched is not None:
            options = {"flush_seconds": 0.05, **work.watched}
            self.scope = rankscope.watch(
                self.model, self.optimizer, run_dir=folder / work.run_dir, **options
            )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank's step."""
        seed = 1000 * self.step + (0 if self.work.same_data else self.rank)
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(8, 16, generator=generator),
            torch.randint(0, 8, (8,), generator=generator),
        )

    def train_step(self) -> None:
        """Train one step."""
        inputs, targets = self.batch()
        loss: Any = F.cross_entropy(self.work.calls(self, inputs), targets)
        if self.scope is not None:
            self.scope.loss(loss.detach(), weight=len(targets))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> float:
        """Wait until the agent has said something; return for how long."""
        began = time.monotonic()
        while time.monotonic() - began < _SETTLE_SECONDS:
            if self.scope.findings or self.scope.traffic.received:
                break
            time.sleep(0.005)
        return time.monotonic() - began

    def bits(self) -> str:
        """Return a digest of parameters, optimizer, random generator, and what was noted."""
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        digest.update(json.dumps(self.noted).encode())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        for value in (*self.model.parameters(), *states):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(local.detach().numpy().tobytes())
        return digest.hexdigest()


def train(rank: int, folder: Path, work: Work) -> None:
    """Train to the end, and leave the bits that came out."""
    board = Board(folder / "board")
    loop = Loop(rank, folder, work)
    began = time.monotonic()
    settled = loop.settle() if loop.scope is not None and work.settles else 0.0
    board.note(rank, 0, began, settled)
    for step in range(STEPS):
        loop.step = step
        work.act(loop)
        loop.train_step()
        board.note(rank, step + 1, began, settled)
        time.sleep(STEP_SECONDS)
    loop.step = STEPS
    work.act(loop)
    if loop.scope is not None and work.closes:
        loop.scope.close()
    (folder / f"bits-{rank}").write_text(loop.bits())
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def be_rank(rank: int, folder: Path, work: Work) -> int:
    """Be a rank in a process that was forked for it; return its exit code."""
    atexit._clear()  # what this process was forked from ends by itself
    log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def script() -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        train(rank, folder, work)

    return as_script(script)


def as_script(script: Callable[[], None]) -> int:
    """Run a script's work as Python does, with what it does at its end; return the exit code."""
    code = 0
    try:
        script()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    return code


def main() -> None:
    """Be a rank that ``torchrun`` has started: rank 1 dies in the first attempt, if it is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--dies-at", type=int, default=-1)
    parser.add_argument("--how", default="exit")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    c10d: Any = dist
    store = c10d.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    own = c10d.PrefixStore(attempt, store)  # else gloo may find addresses of the first attempt
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)

    def act(loop: Loop) -> None:
        if attempt == "0" and rank == 1 and loop.step == asked.dies_at:
            die(asked.how)

    train(rank, asked.folder, Work(watched={} if asked.watched else None, act=act))


def die(how: str) -> None:
    """End this process by ``exit``, by ``kill``, or by raising an ``error``."""
    if how == "exit":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(json.dumps({"dies": how}))


if __name__ == "__main__":
    main()
