"""Runs ranks that are forked from a process that has imported torch; they find a launcher's things.

As a program it is ``torchrun`` whose ranks are forks: its agent, its store and how it ends and
restarts ranks are torch's own.
"""

import atexit
import gc
import importlib
import multiprocessing as mp
import os
import runpy
import signal
import sys
import tempfile
from itertools import dropwhile
from pathlib import Path

from support.ranks import close_patiently, forked


def run_on_ranks(
    num_ranks, words, folder, *, timeout=200.0, prepare=None, script=False, **variables
):
    """Run ``rankscope`` with these words on every rank, in a folder that it may import from.

    ``prepare`` imports what takes seconds; with ``script``, the first word is a script. Returns
    the largest exit code of a rank, and what all of them printed to both streams.
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
    main = _run_script if script else _main
    given = (main, prepare, num_ranks, list(words), str(folder), variables)
    return _run(_fork_ranks, given, timeout)


def torchrun(options, *command, folder=None, timeout=200.0, **variables):
    """Run a script or a module as ``torchrun`` does, on ranks that are forked."""
    given = ([*options, *command], None if folder is None else str(folder), variables)
    return _run(_fork_under_torchrun, given, timeout)


def _run(lead, given, timeout):
    """Fork a leader of ranks; return its exit code and what all have printed and said."""
    with tempfile.TemporaryDirectory() as printed:
        process = forked().Process(target=_lead, args=(lead, given, printed))
        process.start()
        process.join(timeout)
        hangs = process.is_alive()
        if hangs:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        out, err = (Path(printed, name).read_text() for name in ("out", "err"))
    assert not hangs, f"it hangs; it said:\n{err}"
    return process.exitcode, out, err


def _lead(lead, given, printed):
    """Be the process that all ranks are forked from; end as the worst of them does."""
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        with Path(printed, name).open("a") as file:
            os.dup2(file.fileno(), number)
    lead(*given)


def _fork_ranks(main, prepare, num_ranks, words, folder, variables):
    import rankscope.cli.main  # noqa: F401

    if prepare is not None:
        prepare()
    gc.freeze()
    forking = mp.get_context("fork")
    ranks = [
        forking.Process(target=main, args=(rank, words, folder, variables))
        for rank in range(num_ranks)
    ]
    end_with(ranks)


def end_with(ranks):
    """Start ranks, wait for them, and end as the worst of them does."""
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _become_rank(rank, folder, variables):
    import torch

    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    sys.path.insert(0, folder)
    torch.set_num_threads(1)


def _run_script(rank, words, folder, variables):
    _become_rank(rank, folder, variables)
    _interpret(*words)


def _main(rank, words, folder, variables):
    from rankscope.cli import main

    _become_rank(rank, folder, variables)
    sys.argv = ["rankscope", *words]
    os.execve = _leave
    become = ()
    try:
        main.run()
    except _LeftError as left:
        become = left.args
    if become:  # not where an error is being handled, or the script would end with it
        _become(*become)


class _LeftError(BaseException):
    """What ends the command ``rankscope run`` where it would become the script."""


def _leave(path, command, environment):
    raise _LeftError(command, environment)


def _become(command, environment):
    """Go on as the interpreter that ``rankscope run`` starts, but with torch imported."""
    from rankscope.integrations import catch

    os.environ.clear()
    os.environ.update(environment)
    catch.prepare()
    atexit.register(catch.report_if_nothing_was_watched)
    try:  # without Python's own flags, such as -B
        _interpret(*dropwhile(lambda word: word[0] == "-" and word != "-m", command[1:]))
    finally:
        atexit._run_exitfuncs()  # which a fork leaves out


def _fork_under_torchrun(words, folder=None, variables=None):
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    def launch(config, entrypoint):
        config.start_method = "fork"
        return lambda unbuffered, *command: elastic_launch(config, _interpret)(*command)

    os.environ.update(variables or {})
    if folder is not None:
        os.chdir(folder)
    run.elastic_launch = launch
    gc.freeze()
    run.main(words)


def _interpret(*command):
    """Run a script or a module as the interpreter does that is started with these words."""
    close_patiently()
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for name in ("torch._dynamo", "rankscope.session.start", "rankscope.agent.process"):
        importlib.import_module(name)
    _fork_under_torchrun(sys.argv[1:])
