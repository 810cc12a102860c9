"""Forks with a limit on memory and on time, that report tracebacks as failures."""

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from rankscope.errors import RankscopeError

SECONDS = 60
MEMORY = 2 * 2**30


def forked(act: Callable[[], None], err: Path) -> str | None:
    child = os.fork()
    if not child:
        _end(act, err)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return "hang"
        time.sleep(0.005)
    if used.ru_maxrss * 1024 > MEMORY:
        return f"memory: {used.ru_maxrss // 1024} MB"
    code = os.waitstatus_to_exitcode(status)
    text = err.read_text() if err.exists() else ""
    return None if code == 0 else f"{'traceback' if text else f'code {code}'}: {text[-900:]}"


def _end(act: Callable[[], None], err: Path) -> None:
    code, said = 1, StringIO()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_size() + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(said):
            act()
        code = 0
    except (RankscopeError, MemoryError):
        code = 0
    except BaseException as error:
        if type(error).__name__ in ("Exit", "BadParameter"):
            code = 0
        else:
            err.write_text(traceback.format_exc())
    finally:
        if "Traceback (most recent call last)" in said.getvalue():  # the live page goes on
            err.write_text(said.getvalue())
            code = 1
        os._exit(code)


def _size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
