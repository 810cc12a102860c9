"""The loss outside of the model: recorded from its outputs to ``backward``, and run again.

Autograd differentiates what one process computes. Where a loss exchanges tensors, what is lost
between the processes shows in no graph: other ranks' rows that a collective brought are constants
there. So the operators between the model's outputs and ``backward`` are recorded, once, and run
again with outputs moved by ``+v`` and ``-v`` on all ranks at once. The mean loss of all ranks
changes as the gradients that came back to the outputs foretell, or they are not its derivative.

What a script takes out of the graph on purpose, by ``detach()`` or ``no_grad()``, is held; a
collective that was given a tensor with a graph, and returns one without, moves.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.replay import in_short
from rankscope.private import lacking
from rankscope.wrappers.surroundings import has_left_contexts, once_back, surrounded

_C10D = "c10d"
_COLLECTIVES = (_C10D, "_c10d_functional")
_IN_PLACE = frozenset({"allreduce", "broadcast"})
_WRITTEN_FIRST = _IN_PLACE | {
    "allgather", "allgather_base", "reduce_scatter", "reduce_scatter_base",
    "alltoall", "alltoall_base",
}  # fmt: skip
"""Collectives that write into their first argument, without an alias in their schemas."""

_BETWEEN_TWO = frozenset({"send", "recv"})
"""What two ranks do, such as the stages of a pipeline, beside the loss."""

SAME_LOSS = 4e-6  # relative, in float32: a loss that repeats itself
NOT_REPEATED = "the loss does not repeat itself: it uses what has changed"
_SHARED = "the loss writes into a part of a tensor, and then reads the whole"

_OWN_CLASS = "it is computed from tensors of a class of their own"
_PLAIN = (Tensor, torch.nn.Parameter)


def may_record() -> bool:
    """Return whether operators may be recorded here: no context and no compiler would meet that."""
    if lacking("tape") or has_left_contexts() or surrounded():
        return False
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        backends = getattr(compiler, "cached_backends", None)
        if backends is None or any(map(callable, backends.values())):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Operator:
    """A call of an operator; tensors of the tape are numbers in their places."""

    function: Any
    args: Any  # nested, with places in place of tensors of the tape
    kwargs: Any
    written: tuple[int, ...]  # places of arguments that it writes into
    results: tuple[int, ...]  # places of the tensors that it returns, in order

    @property
    def exchanges(self) -> bool:
        """Whether it is a collective."""
        return self.function.namespace in _COLLECTIVES


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of the tape as an argument."""

    number: int
    held: bool  # it keeps its value of the training


class LossTape:
    """What was computed from the outputs of one forward pass, until ``backward`` was called."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._tensors: list[Tensor] = []  # by place; they keep their ids from being used again
        self._places: dict[int, int] = {}
        self._cut: set[int] = set()  # places: lost their graph in a collective, or come from one
        self._inside: set[int] = set()  # places: computed without gradients since they were off
        self._exchanged: set[int] = set()  # places: depend on what a collective has returned
        self._written: set[int] = set()  # memory that was written into
        self._sharing: dict[int, set[int]] = {}  # places by their memory
        # what single ranks have sent to this one, and what was made of it, by its memory
        self._received: dict[int, Tensor] = {}
        self._constants: dict[int, tuple[Tensor, int]] = {}  # with their versions
        self._operators: list[_Operator] = []
        self._mode: _Recorder | None = None
        self._root = -1
        self._weight: Tensor | None = None
        self._problem = ""
        self.touched = False
        """Whether a collective was given tensors made of the outputs."""
        self.num_outputs = len(outputs)
        parts = [o._local_tensor if isinstance(o, DTensor) else o for o in outputs]
        for part in parts:
            self._add(part)
        self._versions = [part._version for part in parts]
        self._wholes = {id(o): o for o, p in zip(outputs, parts, strict=True) if o is not p}
        if any(type(part) not in _PLAIN for part in parts):
            self._problem = _OWN_CLASS

    # Recording --------------------------------------------------------------------------------

    def start(self) -> None:
        """Record the operators of this thread from now on."""
        self._mode = _Recorder(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Record no more; modes that the training has entered since stay."""
        mode = self._mode
        self._mode = None
        if mode is not None:
            mode.tape = None
            once_back(mode.leave)  # which our present work may have left with all others

    def end(self, root: Tensor, weight: Tensor | None) -> None:
        """Note on what ``backward`` is called, and with which gradient."""
        self.stop()
        self._root = self._places.get(id(root), -1)
        self._weight = None if weight is None else weight.detach().clone()
        if root.numel() != 1:
            self._problem = self._problem or "backward is called on more than one number"

    @property
    def exchanges(self) -> bool:
        """Whether the loss depends, or may depend, on what a collective made of the outputs."""
        return self.touched if self._problem else self._root in self._exchanged

    def record(self, function: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Record a call, if it takes a tensor of the tape."""
        if self._problem:
            if function.namespace in _COLLECTIVES:
                self.touched |= any(tensor.requires_grad for tensor in _originals((args, kwargs)))
            return
        try:
            self._record(function, args, kwargs, found)
        except Exception as error:
            self._problem = f"its operators could not be recorded ({in_short(error)})"

    def _record(self, function: Any, args: Any, kwargs: Any, found: Any) -> None:
        graph = torch.is_grad_enabled()
        if graph:
            self._inside.clear()
        originals = list(_originals((args, kwargs)))
        given = [_arriving(tensor) for tensor in originals]
        graphs = {id(_arriving(tensor)) for tensor in originals if tensor.requires_grad}
        known = [tensor for tensor in given if id(tensor) in self._places]
        written = {id(tensor): tensor for tensor in _written(function, args)}
        results = list(_tensors(found))
        if self._is_between_two(function, given, results):
            return
        self._problem = self._why_not(function, given, known, results)
        if self._problem or not known or not (results or written):
            return
        collective = function.namespace in _COLLECTIVES
        read = known
        if collective and _name_of(function) not in _IN_PLACE:
            read = [tensor for tensor in known if id(tensor) not in written]
        free = graphs | set(written)
        held = {id(t) for t in read if id(t) not in free and self._is_held(t, graph=graph)}
        moving = [tensor for tensor in read if id(tensor) not in held]
        numbers = {self._places[id(tensor)] for tensor in moving}
        self.touched |= collective and bool(moving)
        lost = collective and any(id(tensor) in graphs for tensor in moving)
        marks = (
            (self._cut, graph and (lost or not self._cut.isdisjoint(numbers))),
            (self._exchanged, bool(numbers) and not self._exchanged.isdisjoint(numbers)),
            (self._exchanged, collective and bool(numbers)),
            (self._inside, not graph),
        )
        fresh = [t for t in given if id(t) not in self._places and id(t) not in written]
        for tensor in (*fresh, *(t for t in known if id(t) in held)):
            self._constants.setdefault(id(tensor), (tensor, tensor._version))
        for tensor in (*written.values(), *results):
            self._mark(self._add(tensor), marks)
        self._written.update(map(_memory, written.values()))
        for number in chain(*(self._sharing[_memory(t)] for t in written.values())):
            self._mark(number, marks)

        def place(tensor: Tensor) -> Any:
            number = self._places.get(id(tensor))
            return tensor if number is None else _Place(number, id(tensor) in held)

        self._operators.append(
            _Operator(
                function,
                _swapped(args, place),
                _swapped(kwargs, place),
                tuple(self._places[key] for key in written),
                tuple(self._places[id(tensor)] for tensor in results),
            )
        )

    def _is_between_two(
        self, function: Any, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """Return whether a call sends to one rank or receives from one; note what is received."""
        name = _name_of(function)
        received = given if name == "recv" else ()
        if not self._received.keys().isdisjoint(map(_memory, given)):
            received = results
        self._received.update((_memory(tensor), tensor) for tensor in received)
        return name in _BETWEEN_TWO

    def _why_not(
        self,
        function: Any,
        given: Sequence[Tensor],
        known: Sequence[Tensor],  # those of the tape among them
        results: Sequence[Tensor],
    ) -> str:
        """Return why a call cannot be run again; empty if it can, or need not."""
        shared = (t for t in given if id(t) not in self._places and _memory(t) in self._written)
        if next(shared, None) is not None:
            return _SHARED
        if any(id(tensor) in self._wholes for tensor in given):
            return _OWN_CLASS
        if not known:
            return ""
        if not self._received.keys().isdisjoint(map(_memory, given)):
            self.touched = True
            return "it takes tensors that single ranks sent each other"
        if function.namespace == _C10D and _name_of(function) not in _WRITTEN_FIRST:
            self.touched = True
            return f"it calls {_name_of(function)}, which is not run again"
        if torch.Tag.nondeterministic_seeded in function.tags:  # a run would draw the training's
            return "it draws random numbers"
        if any(type(tensor) not in _PLAIN for tensor in (*given, *results)):
            return _OWN_CLASS
        return ""

    def _mark(self, number: int, marks: Sequence[tuple[set[int], bool]]) -> None:
        """Note a result's properties: what is written anew is no longer what it was."""
        for places, _ in marks:
            places.discard(number)
        for places, value in marks:
            if value:
                places.add(number)

    def _is_held(self, tensor: Tensor, *, graph: bool) -> bool:
        """Return whether an argument without a graph keeps its value: it was cut on purpose."""
        number = self._places[id(tensor)]
        if number < self.num_outputs or number in self._cut:
            return False
        return graph or number not in self._inside

    def _add(self, tensor: Tensor) -> int:
        number = self._places.get(id(tensor))
        if number is None:
            number = self._places[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._sharing.setdefault(_memory(tensor), set()).add(number)
        return number

    # Running again ----------------------------------------------------------------------------

    def check(self, root: float) -> None:
        """Check that it can be run again, with the value of the training; else CanaryDeclined.

        No rank waits for another here: what the collectives brought in the training stays.
        """
        if self._problem:
            raise CanaryDeclined(self._problem)
        for tensor, version in self._constants.values():
            if tensor._version != version:
                raise CanaryDeclined("tensors of the loss have changed since")
        outputs = self._tensors[: self.num_outputs]
        if [output._version for output in outputs] != self._versions:
            raise CanaryDeclined("the loss was computed in the memory of the model's outputs")
        try:
            again = self.again(self.outputs, alone=True)
        except Exception as error:
            raise CanaryDeclined(f"it could not be run again ({in_short(error)})") from error
        if not abs(again - root) <= SAME_LOSS * abs(root):
            raise CanaryDeclined(NOT_REPEATED)

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs of the model, without their graph."""
        return [output.detach() for output in self._tensors[: self.num_outputs]]

    @torch.no_grad()
    def again(self, outputs: Sequence[Tensor], *, alone: bool = False) -> float:
        """Return what backward was called on, with other outputs; waits for the device.

        ``alone``: without collectives, whose results are those of the training.
        """
        values = {place: output.clone() for place, output in enumerate(outputs)}

        def value(place: Any) -> Any:
            if not isinstance(place, _Place):
                return place
            kept = self._tensors[place.number].detach()
            return kept if place.held else values[place.number]

        for one in self._operators:
            for number in one.written:
                if number not in values or (alone and one.exchanges):
                    values[number] = self._tensors[number].detach().clone()
            if alone and one.exchanges:
                values.update((n, self._tensors[n].detach().clone()) for n in one.results)
                continue
            found = one.function(*_swapped(one.args, value), **_swapped(one.kwargs, value))
            if one.function.namespace == _C10D:
                (found[-1] if isinstance(found, tuple) else found).wait()
            elif one.exchanges:
                for tensor in _tensors(found):
                    wait_tensor(tensor)  # type: ignore[no-untyped-call]
            values.update(zip(one.results, _tensors(found), strict=True))
        root = values[self._root]
        return float(root if self._weight is None else root * self._weight)


class _Recorder(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operator on, and then to the tape."""

    def __init__(self, tape: LossTape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: LossTape | None = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as without the mode."""
        found = func(*args, **(kwargs or {}))
        if self.tape is not None:
            self.tape.record(func, args, kwargs or {}, found)
        return found

    def leave(self) -> None:
        """Take the mode off the stack, from under later ones."""
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if self not in modes:  # somebody else has taken it away
            return
        later = modes[modes.index(self) + 1 :]
        for _ in later:
            _python_dispatch._pop_mode()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for one in later:
            _python_dispatch._push_mode(one)


def _name_of(function: Any) -> str:
    """Return the name of an operator without its namespace, such as ``allgather``."""
    name: str = function._schema.name
    return name.partition("::")[2].strip("_")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(function: Any, args: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes into."""
    if function.namespace == _C10D:
        yield from _tensors(args[0])
        return
    for argument, value in zip(function._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dictionaries, in order."""
    yield from map(_arriving, _originals(nested))


def _originals(nested: Any) -> Iterator[Tensor]:
    """Yield the same, as they were given."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for one in nested:
            yield from _originals(one)
    elif isinstance(nested, Mapping):
        yield from _originals(list(nested.values()))


def _swapped(nested: Any, value: Callable[[Any], Any]) -> Any:
    """Return nested arguments with every tensor, or place, replaced."""
    if isinstance(nested, list | tuple):
        return type(nested)(_swapped(one, value) for one in nested)
    if isinstance(nested, Mapping):
        return {key: _swapped(one, value) for key, one in nested.items()}
    if isinstance(nested, Tensor):
        return value(_arriving(nested))
    return value(nested) if isinstance(nested, _Place) else nested


def _arriving(tensor: Tensor) -> Tensor:
    """Return the tensor that a collective under way will fill, or the tensor itself."""
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
