"""Runs a function on real ranks: one process each, over gloo, with one thread each."""

import gc
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once instead of in every rank, which would take a large part of the time of all tests:
# what DDP's constructor, PyArrow's first array, every test file and "aot_eager" import.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "pandas",
    "pytest",
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",
    "rankscope.session.start",
    "rankscope.agent.process",
]


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time."""


def forked() -> Any:
    """Return the context whose processes are forked from one that has imported all of that."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def run_ranks(
    work: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run ``work(rank, *args)`` on every rank and return the results in rank order.

    ``work`` is a function of a module. It finds a default process group of ``num_ranks`` ranks.
    """
    context = forked()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_main,
                args=(work, rank, num_ranks, str(Path(folder) / "store"), sending, args),
            )
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        try:
            return [_receive(rank, pipe, timeout) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _receive(rank: int, pipe: Any, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise RankError(f"rank {rank} did not finish within {timeout} s")
    try:
        error, result = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if error:
        raise RankError(f"rank {rank} raised:\n{error}")
    return result


def _main(work: Any, rank: int, num_ranks: int, store: str, pipe: Any, args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # a full collection would copy all that the ranks share
    error, result = "", None
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
        )
        result = work(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    pipe.send((error, result))
    pipe.close()
    if not error:
        dist.barrier()
        dist.destroy_process_group()
