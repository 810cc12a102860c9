"""Runs ``rankscope`` on ranks that are forked from a process that has already imported torch.

They find what a launcher gives them, its variables and its store. Where a test is not about how a
launcher starts and ends ranks, this is the same in a small part of the time.
"""

import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.ranks import forked


def run_on_ranks(
    num_ranks: int,
    words: Sequence[str],
    folder: Path,
    *,
    timeout: float = 200.0,
    prepare: Callable[[], object] | None = None,
    **variables: str,
) -> tuple[int, str, str]:
    """Run ``rankscope`` with these words on every rank, in a folder that it may import from.

    Args:
        num_ranks: How many ranks.
        words: What follows ``rankscope`` on the command line.
        folder: Of the ranks.
        timeout: Seconds that they may take.
        prepare: Imports what would take every rank seconds to import, if anything does.
        variables: Of the environment, besides those that a launcher sets.

    Returns:
        The largest exit code of a rank, and what all of them printed and said.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables |= {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "COLUMNS": "110",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as printed:
        given = (num_ranks, list(words), str(folder), variables, printed)
        process = forked().Process(target=_lead, args=(prepare, *given))
        process.start()
        process.join(timeout)
        hangs = process.is_alive()
        if hangs:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        out, err = (Path(printed, name).read_text() for name in ("out", "err"))
    assert not hangs, f"it hangs; it said:\n{err}"
    return process.exitcode, out, err


def _lead(
    prepare: Callable[[], object] | None,
    num_ranks: int,
    words: list[str],
    folder: str,
    variables: dict[str, str],
    printed: str,
) -> None:
    """Be the process that all ranks are forked from; end as the worst of them does."""
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        with Path(printed, name).open("a") as file:
            os.dup2(file.fileno(), number)
    if prepare is not None:
        prepare()
    gc.freeze()
    forking = mp.get_context("fork")
    ranks = [
        forking.Process(target=_main, args=(rank, words, folder, variables))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _main(rank: int, words: list[str], folder: str, variables: Mapping[str, str]) -> None:
    import torch

    from rankscope.cli import main

    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["rankscope", *words]
    torch.set_num_threads(1)
    main.run()
