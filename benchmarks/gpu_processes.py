"""The processes of ``make gpu``: forked from one that has imported much, and knows no CUDA.

This module does without torch, so that the process can begin before torch is imported here.
"""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any

_PRELOAD = [
    *("torch._dynamo", "torch.nn.parallel", "torch.distributed.fsdp", "torch.profiler", "pandas"),
    *(
        "pyarrow.parquet",
        "rankscope.session.start",
        "rankscope.agent.process",
        "rankscope.agent.server",
    ),
]
"""What parts and ranks import, once for all of them; what is missing is passed over."""

_OF_STUDY = [
    *("transformers.models.llama.modeling_llama", "transformers.optimization"),
    *("transformers.models.auto.tokenization_auto", "transformers.convert_slow_tokenizer"),
    *("rankscope.lab.study.worker", "rankscope.lab.study.runner"),
]


def begin(parts: Sequence[str]) -> None:
    """Start the process that all others are forked from, without waiting for it."""
    if "study" in parts:
        context().set_forkserver_preload([*_PRELOAD, *_OF_STUDY])
    else:
        context()
    forkserver.ensure_running()


def context() -> Any:
    """Return what starts processes: forked from one that has imported torch, but knows no CUDA."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(_PRELOAD)
    return forking


def context_of_ranks(*, dry: bool) -> Any:
    """Return what starts ranks from the process of a part.

    A dry run forks the part itself, which knows no CUDA either: a process of each part to fork
    from would import all of that again.
    """
    return multiprocessing.get_context("fork") if dry else context()


def end_with_parent() -> None:
    """End this process when the one that asked for it has ended, whatever it is doing."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
