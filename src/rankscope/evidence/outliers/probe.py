"""Finds whether workers exchange tensors inside the model's forward pass.

Workers that have parts of the same sequences gather each other's keys and values there, or send
them around a ring. Their losses are then not those of independent samples.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rankscope.bus.probe import Job, MessagePart, RareProbe, Ready
from rankscope.bus.replicas import StateKind
from rankscope.evidence.outliers import EXCHANGES
from rankscope.private import Patch, callers, find
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.untraced import transparent, untraced

_log = logging.getLogger("rankscope")

_LAST = 64  # steps since the start
_CALLS = {
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
"""Methods of a process group that hand tensors on as they are, and the operations' names."""

_FUNCTIONAL = {
    "all_gather_tensor": "all-gather",
    "all_gather_tensor_autograd": "all-gather",
    "all_gather_single": "all-gather",
    "all_to_all_single": "all-to-all",
    "all_to_all_single_autograd": "all-to-all",
    "permute_tensor": "send",
}
"""Those of torch's functional collectives; some call others."""

_NOT_THE_MODEL = (
    *("torch.distributed.fsdp", "torch.nn.parallel", "torch.nn.modules"),
    *("deepspeed.runtime.", "megatron.core.distributed"),
)
"""Packages that gather parameters, or statistics of normalisations."""

_ROWS = 2  # dimensions of samples with one row each

_MODULE_CALL = "torch.nn.modules.module"


class ExchangeProbe(RareProbe):
    """Counts the model's exchanges among workers in a forward pass, in growing distances.

    It listens in the first forward pass of steps 0, 1, 2, 4, 8 and so on, until one has any.
    """

    def __init__(self, workers: frozenset[int], first_step: int) -> None:
        super().__init__(first_step, last=_LAST)
        self._workers = workers
        self._patches: list[Patch] = []
        self._thread = 0
        self._inside = False  # a call of one
        self._found: Counter[str] = Counter()
        self._known = False

    def before_forward(self, step: int, *, first: bool) -> None:
        """Listen to the pass that begins, where it is due."""
        self._stop()
        if first and self.due and not self._known:
            self._thread = threading.get_ident()
            functional: Any = find("torch.distributed._functional_collectives")
            for owner, names in ((ProcessGroup, _CALLS), (functional, _FUNCTIONAL)):
                for name in filter(owner.__dict__.__contains__, names):
                    self._patches.append(Patch(owner, name, self._noting(names[name])))

    def after_forward(self) -> None:
        """Keep the number of calls by operation; once there were any, no other pass is due."""
        self._stop()
        if self._found:
            self._known = True
            calls = {str(StateKind.EXCHANGED): dict(self._found)}
            self.pending = Ready(MessagePart(names={EXCHANGES: calls}))
            self._found.clear()

    def abort(self) -> None:
        """Forget a step that was never finished."""
        super().abort()
        self._stop()
        self._known = False
        self._found.clear()

    def close(self) -> None:
        """Listen no longer."""
        self._stop()

    def _stop(self) -> None:
        for patch in reversed(self._patches):
            patch.remove()
        self._patches = []

    def _noting(self, operation: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @transparent
            @wraps(original)
            def noting(*args: Any, **kwargs: Any) -> Any:
                traced = torch.compiler.is_compiling()
                if traced or self._inside or threading.get_ident() != self._thread:
                    return original(*args, **kwargs)
                self._inside = True
                try:
                    self._note(operation, args, kwargs)
                    return original(*args, **kwargs)
                finally:
                    self._inside = False

            return noting

        return make

    @untraced
    def _note(self, operation: str, args: Any, kwargs: Any) -> None:
        try:
            given = [*args, *kwargs.values()]
            group = next((one for one in given if isinstance(one, ProcessGroup)), None)
            ranks = [] if group is None else ranks_of(group)
            among = len(self._workers.intersection(ranks)) > 1
            if among and _may_be_parts(operation, given) and _is_the_models():
                self._found[operation] += 1
        except Exception as error:
            _log.debug("a collective of the forward pass is not read: %r", error)


def _may_be_parts(operation: str, given: list[Any]) -> bool:
    """Return whether what is exchanged may be parts of sequences, ``[B, L, ...]``.

    It is not where each sample has one row, or ranks get unequal numbers of rows, as experts do.
    """
    if operation == "send":
        return True
    splits = [one for one in given if isinstance(one, list) and all(type(n) is int for n in one)]
    are_even = all(len(set(one)) <= 1 for one in splits)
    return are_even and all(tensor.dim() > _ROWS for tensor in tensors_in(given))


def _is_the_models() -> bool:
    """Return whether the present call comes from the own code of the innermost ``nn.Module``."""
    names = (str(frame.f_globals.get("__name__", "")) for frame in callers())
    inside = takewhile(lambda name: name != _MODULE_CALL, names)
    return not any(name.startswith(_NOT_THE_MODEL) for name in inside)


def make_probe(job: Job) -> ExchangeProbe | None:
    """Return the probe of exchanges; None where there is one worker."""
    workers = frozenset(ranks_of(job.wrapped.group)) if dist.is_initialized() else frozenset[int]()
    return ExchangeProbe(workers, job.first_step) if len(workers) > 1 else None
