"""The audit of the optimizer's update, in steps that are verified.

It works inside the optimizer's own call, in hooks that are there for that step alone: so it gets
gradient and state as the optimizer does, and the parameter after all other hooks. Whole parameters
are gathered in the training's own process groups, after all ranks that hold a part have agreed in
its store. Only one whole parameter is there at a time.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.bus.probe import Job, Probe, StepEnd
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.update.audit import UpdateAudit
from rankscope.evidence.update.compare import UpdateShare
from rankscope.wrappers.calls import ForeignHook
from rankscope.wrappers.optimizers import all_of, has_closure
from rankscope.wrappers.surroundings import outside, traced

_log = logging.getLogger("rankscope")

_NO_OPTIMIZER = "watch() was not given the optimizer"
_ENGINE = "{} keeps gradients or weights outside of the parameters, where no copy gets them"
_CLOSURE = "it is called with a closure"


class UpdateProbe(Probe):
    """Audits the optimizers of one watched model on one worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at = frozenset(job.verify_at)
        self._requested = self._due = False
        self._step = -1
        self._audit: UpdateAudit | None = None
        self._handles: list[Any] = []
        wrapped = job.wrapped
        self._optimizers = [
            each
            for each in all_of(job.optimizer)
            if isinstance(each, torch.optim.Optimizer) and "param_groups" in vars(each)
        ]
        self._why_not = "" if self._optimizers else _NO_OPTIMIZER
        if not wrapped.kind.own_optimizer:
            self._why_not = _ENGINE.format(wrapped.kind)
        mesh = job.channel.mesh
        self._meeting = (None if mesh is None else mesh.ranks) or job.channel.meeting

    def ask(self) -> None:
        """Audit the update of the next step; all workers request the same step."""
        self._requested = True

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Begin an audit, if one is due, at the step's first forward pass."""
        if step == self._step:
            return
        self._step = step
        self.close()
        if self._requested or step in self._at:
            self._requested = False
            self._due = True
            start = time.perf_counter()
            self._try(self._begin)
            self._job.leave_out(time.perf_counter() - start)

    def collect(self, end: StepEnd) -> None:
        """Send the share of the step that ends."""
        if not self._due:
            return
        start = time.perf_counter()
        share = UpdateShare(declined={"": self._why_not})
        if self._audit is not None:
            share = self._audit.share()
        self.close()
        if self._job.channel.has_room():
            self._job.channel.send("update", end.step, share.pack())
        end.busy_seconds = float("nan")
        end.leave_out(time.perf_counter() - start)

    def abort(self) -> None:
        """Forget the present step, which an exception has ended; it will begin again."""
        self._requested |= self._due
        self._step = -1
        self.close()

    def close(self) -> None:
        """Remove the hooks, and forget the update."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._audit = None
        self._due = False

    def _begin(self) -> None:
        if self._why_not:
            return
        names, copies = _names(self._job.wrapped.parameters, self._optimizers)
        self._audit = UpdateAudit(self._step, self._optimizers, names, copies, self._meeting)
        for optimizer in self._optimizers:
            before = ForeignHook(self._before, compiled=True)
            after = ForeignHook(self._after, compiled=True)
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._audit is None or traced():
            return
        if has_closure(args, kwargs):
            self._audit.decline(optimizer, _CLOSURE)
        else:
            self._try(outside, self._audit.before, optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._audit is not None and not traced():
            self._try(outside, self._audit.after, optimizer)

    def _try(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function; if it fails, the update is not audited, in this step and later ones."""
        try:
            work(*args)
        except Exception as error:
            _log.debug("an update could not be audited", exc_info=True)
            self._why_not = f"something failed ({in_short(error)})"
            self._audit = None


def _names(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[int, str], dict[int, Tensor]]:
    """Return names of the optimizers' parameters by their ids, and the model's own copies.

    They are copies where most in the same order are equal but for rounding to another type.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    pairs = list(zip(held, parameters.items(), strict=False))
    if any(id(p) in names for p in held) or len(held) != len(parameters):
        return names, {}
    alike = [
        p.shape == q.shape and p.dtype != q.dtype and bool((p.detach().to(q.dtype) == q).all())
        for p, (_, q) in pairs
    ]
    if 2 * sum(alike) < len(alike):
        return names, {}
    names |= {id(p): name for p, (name, _) in pairs}
    return names, {id(p): q for p, (_, q) in pairs}


make_probe = UpdateProbe
