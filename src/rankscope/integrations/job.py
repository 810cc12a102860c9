"""What ``rankscope run`` hands on to the processes of a job, through their environment."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "RANKSCOPE_RUN"
"""Holds the job as JSON; inherited by all processes that the script starts."""

PID_VARIABLE = "RANKSCOPE_RUN_PID"
"""Number of the process that the command became: the script, or what starts its ranks."""

STARTUP = Path(__file__).parent / "startup"
"""A folder whose only module Python imports at its start."""


@dataclass(frozen=True, slots=True)
class Job:
    """A script that is to be watched.

    Attributes:
        run_dir: Absolute path of the run's directory: scripts may change their working directory.
        script: What is run, in short.
        options: Further options of :func:`rankscope.watch`.
        started: When the command was called, in seconds since 1970.
        untold: Path of a file that is gone once a process of this host has told whether it is
            watched; empty if none could be made.
    """

    run_dir: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    untold: str = ""

    def to_environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return an environment in which Python processes look for what to watch."""
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(STARTUP), *(path for path in before if path and path != str(STARTUP))]
        return {
            **environment,
            "PYTHONPATH": os.pathsep.join(paths),
            VARIABLE: json.dumps(asdict(self)),
            PID_VARIABLE: str(os.getpid()),
        }

    def tell(self) -> bool:
        """Note that this process tells whether it is watched; return whether none did before."""
        try:
            Path(self.untold).unlink()
        except OSError:
            return False
        return True

    @classmethod
    def of_this_process(cls) -> "Job":
        """Return the job that this process belongs to.

        Raises:
            KeyError: It belongs to none.
        """
        return cls(**json.loads(os.environ[VARIABLE]))
