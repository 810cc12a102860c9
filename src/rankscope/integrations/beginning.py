"""Begins to watch a model that a script is about to train, on all ranks or on none.

Where the job has other axes, such as a pipeline's, ranks whose models have other trained parameters
hold other parts of a model. Those with the same ones are the workers of a model without wrapper, if
the training has made a process group of exactly them.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from rankscope.errors import RunError, UnsupportedError
from rankscope.integrations.rollouts import follow_calling_trainer
from rankscope.integrations.run_script import ScriptJob
from rankscope.private import Patch, callers, find
from rankscope.session.meetings import stages_begin_apart
from rankscope.session.scope import Scope
from rankscope.session.start import log_to_stderr, watch
from rankscope.wrappers.ddp_model import is_ddp
from rankscope.wrappers.find import (
    find_parts,
    find_wrapper,
    in_training_mode,
    watchable_classes,
)
from rankscope.wrappers.living import WRAPPING, live_objects
from rankscope.wrappers.optimizers import copies_of, first_of
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.rendezvous import BEGIN_SECONDS, agree, default_store, place_of_all
from rankscope.wrappers.wrapped import is_compiled

_log = logging.getLogger("rankscope")

_WATCHED_ALREADY = "the script watches its training itself"
_PATIENCE_ALONE = 30.0  # for all ranks of a model without a wrapper: some may train none
_INNER = ("optimizer", "_optimizer")  # the wrapped one, of Accelerate and Lightning
_CONTAINED = ("optimizers", "_optimizers")  # several, of torchtitan and its like


@dataclass(frozen=True, slots=True)
class Watching:
    """A script's training that is being watched."""

    scope: Scope
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]

    def close(self, error: BaseException | None) -> None:
        """Finish the run; one that ``error`` has ended is incomplete."""
        self.scope.__exit__(None if error is None else type(error), error, None)


@dataclass(frozen=True, slots=True)
class Earlier:
    """A training of the script that was watched before; the new one does not continue it."""

    since: Sequence[nn.Module]  # wrappers that were made since it began
    optimizers: Sequence[Optimizer]  # its own


_begun: Counter[str] = Counter()  # how often the ranks of a group have agreed to begin
_met: dict[tuple[int, ...], str] = {}  # by the ranks of a group, what their first meeting came to
_EVALUATES = "a rank runs the model in evaluation mode"


def _end_with_lightning(scope: Scope) -> None:
    """Close a scope where the Trainer that calls the model ends ``fit`` by an exception.

    On SIGTERM, the script then exits with 0.
    """
    for frame in callers():
        trainer: Any = frame.f_locals.get("self")
        if hasattr(type(trainer), "received_sigterm"):
            around = partial(partial, partial(_see_exception, scope, trainer))
            scope.until_closed(Patch(trainer.strategy, "on_exception", around))
            return


def _see_exception(
    scope: Scope, trainer: Any, on_exception: Callable[..., Any], error: BaseException
) -> Any:
    if trainer.state.fn == "fit":
        scope.__exit__(type(error), error, error.__traceback__)
    return on_exception(error)


def begins_later(model: nn.Module, *, evaluates: bool) -> bool:
    """Return whether the ranks of a wrapped model begin after their first step, the same on all.

    So they do if one of them ``evaluates``, in the first forward pass of each: it may train that
    way, and the others would wait for it in a pass whose reduction it waits for. RunError where a
    rank does not come.
    """
    wrapped = find_wrapper(model)
    if wrapped.kind.by_loop:
        return evaluates
    ranks = tuple(ranks_of(wrapped.group))
    if ranks not in _met:
        problem = _EVALUATES if evaluates else ""
        _met[ranks] = _agree(wrapped.group, problem, BEGIN_SECONDS)
    if _met[ranks] not in ("", _EVALUATES):
        raise RunError(_met[ranks])
    return evaluates or bool(_met[ranks])


def begin(
    model: nn.Module,
    job: ScriptJob,
    called: Sequence[Optimizer] = (),
    earlier: Earlier | None = None,
) -> Watching | None:
    """Watch a model from now on, unless the script does so itself: then return None.

    Every rank of the model's data-parallel group calls it before its first training step; the ranks
    agree through the store, without a collective. ``called`` are optimizers that were called
    before, in this order. A RankscopeError, the same on all ranks, says why it cannot be watched.
    """
    log_to_stderr()
    wrapped = find_wrapper(model)
    alone = wrapped.kind.by_loop
    context = CallerContext(model, called, earlier)
    patience = _PATIENCE_ALONE if alone else BEGIN_SECONDS
    problem = _agree(wrapped.group, _WATCHED_ALREADY if context.is_watched else "", patience)
    if problem == _WATCHED_ALREADY:
        _log.info("rankscope run leaves this training alone: %s", problem)
        return None
    if problem:
        raise RunError(problem)
    models = [model, *(context.other_parts(wrapped.group) if wrapped.kind.one_of_many else ())]
    optimizers = context.optimizers(models)
    if not optimizers and wrapped.kind.own_optimizer:
        optimizers = context.optimizers_by_shape(models)
    with torch.autocast(wrapped.device.type, enabled=False), stages_begin_apart():
        scope = watch(
            models if len(models) > 1 else model,
            optimizers or None,
            run_dir=job.run_dir,
            config={"script": job.script},
            process_group=find_worker_group(model) if alone else None,
            **{"resume": earlier is None, **job.options},
        )
    follow_calling_trainer(scope)
    _end_with_lightning(scope)
    _log_unwatched(context, models, found=bool(optimizers))
    return Watching(scope, models, optimizers)


def _agree(group: dist.ProcessGroup, problem: str, patience: float) -> str:
    ranks = ranks_of(group)
    c10d: Any = dist.distributed_c10d
    place = f"rankscope-run/{ranks[0]}/{len(ranks)}"
    store = c10d.PrefixStore(f"{place}/{_begun[place]}", default_store())
    _begun[place] += 1
    late = (
        "after {seconds:.0f} s, {ready} of {num_ranks} ranks had begun to train under rankscope "
        "run; start all ranks with it"
    )
    return agree(store, len(ranks), problem, patience, late=late)


class CallerContext:
    """The optimizers, wrappers and scopes that exist beside a model when its training begins."""

    def __init__(
        self,
        model: nn.Module,
        called: Sequence[Optimizer] = (),
        earlier: Earlier | None = None,
    ) -> None:
        self._model = model
        self._earlier = earlier
        wrappers = watchable_classes()
        found = live_objects(Optimizer, Scope, *wrappers)
        self._optimizers = _each_once([*found[Optimizer], *called])
        living = (wrapper for kind in wrappers for wrapper in found[kind])
        since = None if earlier is None else set(map(id, earlier.since))
        self._wrappers = [one for one in living if since is None or id(one) in since]
        self.is_watched = any(not scope._closed for scope in found[Scope])
        """Whether the script watches itself."""

    def optimizers(self, models: Sequence[nn.Module]) -> list[Optimizer]:
        """Return the optimizers of models, the one of the most elements first."""
        parameters = [p for model in models for p in model.parameters()]
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        ranked = []
        for optimizer in _without_wrappers(self._optimizers):
            own = [place[id(p)] for p in _held_by([optimizer]) if id(p) in place]
            if own:
                elements = sum(parameters[number].numel() for number in own)
                ranked.append((-elements, min(own), type(optimizer).__name__, optimizer))
        ranked.sort(key=lambda entry: entry[:3])
        found = [entry[-1] for entry in ranked]
        if self._earlier is None:
            return found
        new = [each for each in found if not any(each is old for old in self._earlier.optimizers)]
        by_new, by_all = ({id(p) for p in _held_by(each)} & place.keys() for each in (new, found))
        return new if by_new == by_all else found

    def optimizers_by_shape(self, models: Sequence[nn.Module]) -> list[Optimizer]:
        """Return the optimizer of tensors that have the shapes of all trained parameters of models.

        They are parameters of no module. Nothing where there are several such optimizers.
        """
        trained = (p for model in models for p in model.parameters() if p.requires_grad)
        wanted = Counter(p.shape for p in trained)
        modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
        known = {id(p) for module in modules for p in module._parameters.values()}
        found = []
        for optimizer in _without_wrappers(self._optimizers):
            held = _held_by([optimizer])
            if known.isdisjoint(map(id, held)) and Counter(p.shape for p in held) == wanted:
                found.append(optimizer)
        return found if len(found) == 1 else []

    def other_parts(self, group: dist.ProcessGroup) -> list[nn.Module]:
        """Return the other parts of the training that can be watched with the model as one run.

        They are in a DDP each, as the model, and an optimizer updates them. All ranks have them in
        one order, that of what they hold.
        """
        updated = {id(parameter) for parameter in _held_by(self._optimizers)}
        ranks = ranks_of(group)
        parts: list[nn.Module] = [
            other
            for other in self.other_models()
            if is_ddp(other)
            and ranks_of(other.process_group) == ranks
            and any(id(parameter) in updated for parameter in other.parameters())
        ]
        parts.sort(key=_content)
        try:
            find_parts([self._model, *parts])
        except UnsupportedError as error:
            _log.debug("the parts of the training cannot be watched as one run: %s", error)
            return []
        return parts

    def other_models(self) -> list[nn.Module]:
        """Return the outermost other data-parallel models that are in training mode."""
        known = {id(parameter) for parameter in self._model.parameters()}
        others = [
            wrapper
            for wrapper in self._wrappers
            if in_training_mode(wrapper)
            and any(p.requires_grad and id(p) not in known for p in wrapper.parameters())
            and not any(id(p) in known for p in wrapper.parameters())
        ]
        inner = {id(part) for other in others for part in other.modules() if part is not other}
        return [other for other in others if id(other) not in inner]


def _held_by(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def _content(model: nn.Module) -> tuple[Any, ...]:
    """Return a fingerprint of a model, the same on all ranks as DDP has made them equal."""
    kind = type(getattr(model, "module", model)).__name__
    parameters = list(model.parameters())
    first = first_of(parameters[0]).tolist()
    return kind, sum(each.numel() for each in parameters), len(parameters), first


def _without_wrappers(optimizers: Sequence[Optimizer]) -> Iterable[Optimizer]:
    """Leave out optimizers that only pass calls on to another one of them.

    A container of several is one of its own.
    """
    known = {id(optimizer) for optimizer in optimizers}
    for optimizer in optimizers:
        inner = [vars(optimizer).get(name) for name in _INNER]
        for name in _CONTAINED:
            several = vars(optimizer).get(name)
            several = several.values() if isinstance(several, dict) else several
            if isinstance(several, Collection) and len(several) == 1:
                inner += several
        if not any(id(thing) in known for thing in inner if thing is not optimizer):
            yield optimizer


def with_living(called: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of this process; ``gc.freeze()`` hides all but those called."""
    return _each_once([*live_objects(Optimizer)[Optimizer], *called])


def _each_once(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def bare_models(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the living modules that hold all parameters of optimizers, if none is wrapped.

    Or of which these are copies, where no module holds any of them. Nor do wrappers of just these
    modules count: they were not called before the optimizers were. Compiled modules stand for what
    they compile.
    """
    wanted = {id(parameter): parameter for parameter in _held_by(optimizers)}
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    found = [m for m in modules if wanted.keys() <= {id(p) for p in m.parameters()}]
    if wanted.keys().isdisjoint(id(p) for m in modules for p in m._parameters.values()):
        copies = list(wanted.values())
        copied = [module for module in modules if copies_of(module.parameters(), copies)]
        found = [
            m
            for m in copied
            if all(p.grad is not None or not p.requires_grad for p in m.parameters())
        ]
        if not found:  # the loop takes them away
            types = {copy.dtype for copy in copies}
            found = [m for m in copied if types.isdisjoint(p.dtype for p in m.parameters())]
    if any(isinstance(module, WRAPPING) and module not in found for module in modules):
        return []
    found = [module for module in found if not isinstance(module, WRAPPING)]
    inside = {id(part) for module in found if is_compiled(module) for part in module.children()}
    return [module for module in found if id(module) not in inside]


def _log_unwatched(context: CallerContext, watched: Sequence[nn.Module], *, found: bool) -> None:
    """Log, on rank 0, the models that are not watched, and if no optimizer was ``found``."""
    if dist.get_rank() != 0:
        return
    others = [model for model in context.other_models() if model not in watched]
    if others:
        _log.warning(
            "rankscope watches the model that trains first; not watched: %s",
            ", ".join(type(getattr(model, "module", model)).__name__ for model in others),
        )
    if not found:
        _log.info("rankscope found no optimizer of the model")


def find_worker_group(model: nn.Module) -> Any:
    """Return the process group of the workers of a model without wrapper; None for all ranks.

    Every rank of the job calls it at the same point of the program; it makes no collective call.
    """
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    c10d: Any = dist.distributed_c10d
    store = place_of_all("rankscope-run/workers", num_ranks)
    store.set(str(rank), parameters_digest(model))
    if agree(c10d.PrefixStore("met", store), num_ranks):
        return None
    digests = store.multi_get([str(other) for other in range(num_ranks)])
    ranks = [other for other, digest in enumerate(digests) if digest == digests[rank]]
    if len(ranks) == num_ranks:
        return None
    group = group_of(ranks) if len(ranks) > 1 else None
    problem = "" if group is not None else f"rank {rank} has no group of its model's workers"
    return None if agree(c10d.PrefixStore("found", store), num_ranks, problem) else group


def parameters_digest(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's trained parameters."""
    trained = sorted((n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad)
    return hashlib.blake2b(repr(trained).encode(), digest_size=16).hexdigest()


def group_of(ranks: list[int]) -> Any:
    """Return the training's process group of exactly these ranks; None if it made none."""
    for group in find("torch.distributed.distributed_c10d._world.pg_map") or ():
        if isinstance(group, dist.ProcessGroup) and ranks_of(group) == ranks:
            return group
    return None
