"""How the detectors of a restarted job go on where those of the run before stood.

A run's directory holds what its detectors remembered when its tables were last written
(``detectors.npz``). What came later is in the tables, and is diagnosed again from there. With what
is known at its end, the next run begins (``detectors-start.npz``). Step numbers go on, too: the
first step is the one after the last that is known of the run before.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from rankscope.core.state import State, StateError
from rankscope.diagnose.diagnosis import Diagnosis, diagnosis_of
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, read_state, unpack_state

_log = logging.getLogger("rankscope")


def state_after(
    previous: Path, num_workers: int, hosts: Sequence[str], groups: Sequence[str]
) -> State | None:
    """Return what is known at the end of a run, for a restarted job to begin with.

    Args:
        previous: The directory of the run before; its process may have been killed.
        num_workers: Workers of the restarted job.
        hosts: Host of each rank of the restarted job.
        groups: Its groups of parameters.

    Returns:
        The state of a diagnosis; None when the detectors have to start anew, which is logged.
    """
    try:
        state = _diagnosis_after(previous, num_workers, groups).state()
        Diagnosis(num_workers, hosts).restore(unpack_state(pack_state(state)))  # as all ranks will
        return state
    except (StateError, RunError) as error:
        reason = str(error)
    except Exception as error:  # whatever it is, a job must not fail to start for it
        _log.debug("cannot go on from %s", previous, exc_info=error)
        reason = repr(error)
    _log.warning("the detectors start anew, not from %s: %s", previous, reason)
    return None


def _diagnosis_after(previous: Path, num_workers: int, groups: Sequence[str]) -> Diagnosis:
    run = Run.open(previous)
    if run.num_workers != num_workers:
        raise StateError(f"it had {run.num_workers} workers, this job has {num_workers}")
    if list(run.info.get("options", {}).get("groups", groups)) != list(groups):
        raise StateError("it had other groups of parameters")
    diagnosis = diagnosis_of(run)  # what came later was meant to follow that run's plan
    diagnosis.restore(_last_state(previous))
    for report in run.iter_reports(diagnosis.next_step):
        diagnosis.observe(report)
    diagnosis.close()
    return diagnosis


def _last_state(previous: Path) -> State:
    """Return the last state that a run wrote; the one it began with if it was killed before."""
    for name in (STATE_FILE, START_FILE):
        try:
            state = read_state(previous / name)
        except StateError as error:
            raise StateError(f"{name} is of no use: {error}") from error
        if state is not None:
            return state
    raise StateError(f"it has no {STATE_FILE}")
