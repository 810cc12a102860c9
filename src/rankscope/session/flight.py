"""Torch's Flight Recorder in the training's process: whether it is on, and what it holds."""

import json
import logging
import os
from collections.abc import Callable

import torch.distributed as dist

from rankscope.agent.flight_recorder import RecorderThread
from rankscope.private import find

_log = logging.getLogger("rankscope")

_MODULE = "torch._C._distributed_c10d"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def start_recorder_thread() -> RecorderThread | None:
    """Return what gives this rank's collectives to the agent; None where none are recorded."""
    module = find(_MODULE)
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of any backend, and of NCCL
    dumps = [dump for name in names if (dump := getattr(module, name, None)) is not None]
    try:
        if dumps and (_is_on() or any(map(_holds_something, dumps))):
            return RecorderThread(dist.get_rank(), lambda: [dump() for dump in dumps])
    except Exception as error:  # no thread, or another release's form
        _log.debug("hangs will be reported without the collectives of the ranks: %s", error)
    return None


def _is_on() -> bool:
    sizes = [os.environ[name] for name in _SIZES if name in os.environ]
    return bool(sizes) and sizes[0].isdecimal() and int(sizes[0]) > 0


def _holds_something(dump: Callable[[], bytes]) -> bool:
    """Return whether NCCL's recorder is on, as some releases have it without being requested."""
    return bool(json.loads(dump()).get("entries"))
