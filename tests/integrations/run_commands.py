"""What the tests of ``rankscope run`` share: how scripts are started."""

import os
import subprocess
import sys
from pathlib import Path

from support.forked_ranks import run_on_ranks

SCRIPTS = Path(__file__).parent / "run_scripts"
RUN = [sys.executable, "-m", "rankscope", "run", "--no-canary", "--overhead-budget", "none"]


def start(*command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "PATH": path},
        timeout=240,
    )


def start_on_ranks(run_dir, script, *words, **variables):
    command = [*RUN[3:], "--run-dir", str(run_dir), str(script), *words]
    ended = run_on_ranks(2, command, SCRIPTS, **variables)
    return subprocess.CompletedProcess(command, *ended)
