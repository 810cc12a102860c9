"""Runs a function on real ranks: one process each, over gloo, with one thread each."""

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest

from rankscope.evidence import NAMES

# Imported once instead of in every rank, which would take a large part of the time of all tests:
# what DDP's constructor, PyArrow's first array, every test file, "aot_eager" and watch() import.
# Not every kind of evidence has all parts: a name that is none of a module is passed over.
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
    *(
        f"rankscope.evidence.{kind}.{part}"
        for kind in NAMES
        for part in ("probe", "director", "judge")
    ),
]


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time."""


def forked():
    """Return the context whose processes are forked from one that has imported all of that."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def run_ranks(work, num_ranks, *args, timeout=120.0, prepare=None):
    """Run ``work(rank, *args)``, a function of a module, on ranks; return what each returned."""
    context = forked()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        calls = [
            (work, rank, num_ranks, str(Path(folder) / "store"), sending, args)
            for rank, (_, sending) in enumerate(pipes)
        ]
        if prepare is None:
            processes = [context.Process(target=_main, args=call) for call in calls]
        else:
            processes = [context.Process(target=_prepare, args=(prepare, calls))]
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        try:
            return [_receive(rank, pipe, timeout) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in processes:
                _end(process, of_a_group=prepare is not None)


def on_ranks(work, num_ranks, **options):
    """Return a fixture of a module: what ``work(rank, folder)`` returned on ranks, and folder."""

    @pytest.fixture(scope="module")
    def ran():
        with tempfile.TemporaryDirectory() as folder:
            yield run_ranks(work, num_ranks, folder, **options), Path(folder)

    return ran


def alone_and_watched(train, ways, num_ranks):
    """Return a fixture as on_ranks(): by way, what ``train`` returned unwatched and watched."""
    return on_ranks(partial(_train_alone_and_watched, train, tuple(ways)), num_ranks)


def _train_alone_and_watched(train, ways, rank, folder):
    return {way: (train(rank, way, None), train(rank, way, f"{folder}/{way}")) for way in ways}


def _end(process, *, of_a_group):
    process.join(timeout=10)
    if process.is_alive():
        if of_a_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _receive(rank, pipe, timeout):
    if not pipe.poll(timeout):
        raise RankError(f"rank {rank} did not finish within {timeout} s")
    try:
        error, result = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if error:
        raise RankError(f"rank {rank} raised:\n{error}")
    return result


def _prepare(prepare, calls):
    os.setpgid(0, 0)
    prepare()
    gc.freeze()
    processes = [mp.get_context("fork").Process(target=_main, args=call) for call in calls]
    for process in processes:
        process.start()
    for *_, sending, _ in calls:
        sending.close()  # or a rank that died would not be noticed
    for process in processes:
        process.join()


def close_patiently():
    """Let scopes wait longer for their agents as they close: other tests keep processors busy."""
    from rankscope.session.scope import Scope

    Scope.close.__defaults__ = (40.0,)


def answer(work, rank, num_ranks, store, pipe, args):
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
    return error


def _main(*call):
    import torch.distributed as dist

    close_patiently()
    if not answer(*call):
        dist.barrier()
        dist.destroy_process_group()
