"""Runs ``rankscope`` on ranks that are forked from a process that has already imported torch.

They find what a launcher gives them, its variables and its store. Where a test is not about how a
launcher starts and ends ranks, this is the same in a small part of the time.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.ranks import forked


def run_on_ranks(
    num_ranks: int, words: Sequence[str], folder: Path, *, timeout: float = 200.0
) -> tuple[int, str, str]:
    """Run ``rankscope`` with these words on every rank, in a folder that it may import from.

    Returns:
        The largest exit code of a rank, and what all of them printed and said.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "COLUMNS": "110",
    }
    with tempfile.TemporaryDirectory() as printed:
        processes = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (list(words), str(folder), {**variables, **own}, printed)
            processes.append(forked().Process(target=_main, args=args))
            processes[-1].start()
        codes = []
        for process in processes:
            process.join(timeout)
            codes.append(process.exitcode)
            if process.is_alive():
                process.kill()
        out, err = (Path(printed, name).read_text() for name in ("out", "err"))
    assert None not in codes, f"it hangs on ranks with codes {codes}; it said:\n{err}"
    return max(codes), out, err


def _main(words: list[str], folder: str, variables: dict[str, str], printed: str) -> None:
    import torch

    from rankscope.cli import main

    for number, name in ((1, "out"), (2, "err")):
        with Path(printed, name).open("a") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["rankscope", *words]
    torch.set_num_threads(1)
    main.run()
