"""Exact digests of a model's state, of some of it in every step.

Parameters, buffers, the optimizer's state and the gradients take turns, so that a step pays for a
small part of them, and all of them are compared within one rotation.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.capture.digest import PendingDigest, digest_bits, word_of
from rankscope.capture.host import HostCopy
from rankscope.capture.kernels.bits import signed
from rankscope.capture.state_plan import Item, Lasting, Plan, Slice, survey
from rankscope.capture.state_reading import GradientNorms, digest_optimizer, prepare
from rankscope.core.replicas import StateDigests, StateKind

_UNREADABLE = PendingDigest(word_of("cannot be read"))
_COLUMNS = {
    StateKind.PARAMETER: "param_digest",
    StateKind.BUFFER: "buffer_digest",
    StateKind.OPTIMIZER: "optimizer_digest",
    StateKind.REDUCED: "reduced_digest",
    StateKind.APPLIED: "applied_digest",
}
_MOMENTS = (StateKind.REDUCED, StateKind.APPLIED)
_STATE = (StateKind.PARAMETER, StateKind.BUFFER, StateKind.OPTIMIZER)

_log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True)
class _Row:
    """One digest of a step.

    Attributes:
        kind: What it is of.
        name: The item's name.
        parts: A digest of each of the item's slices.
        before: For a reduced gradient: digests of the same slices before the reduction; None
            where that was not seen.
        reduced: For a reduced gradient: which of its slices are reduced at all.
    """

    kind: StateKind
    name: str
    parts: list[PendingDigest]
    before: list[PendingDigest | None]
    reduced: list[bool]


class PendingState:
    """The digests of one step on their way to the host.

    Args:
        rows: The digests.
        seen: The kinds that could be read in this step.
        norms: Squared norms of the reduced and of the applied gradient, in parts.
        layout: Digest of the plan; None without one.
    """

    def __init__(
        self,
        rows: Sequence[_Row],
        seen: Iterable[StateKind],
        norms: Sequence[Sequence[float | Tensor]],
        layout: int | None,
    ) -> None:
        self._rows = rows
        self._seen = frozenset(seen)
        self._norms = norms
        self._layout = layout
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for tensor in self._tensors():
            by_device[tensor.device].append(_as_bits(tensor))
        self._copies = {d: HostCopy(torch.stack(each)) for d, each in by_device.items()}

    def read(self) -> tuple[StateDigests, dict[str, float | int]]:
        """Wait for the device.

        Returns:
            The digests, and LOCAL signals: ``state_layout`` and, as far as they are known,
            ``param_digest``, ``buffer_digest``, ``optimizer_digest``, ``reduced_digest``,
            ``applied_digest`` and ``applied_scale``.
        """
        arrived = self._arrived()
        digests, unchanged = [], []
        for row in self._rows:
            parts = [_number(part, arrived) for part in row.parts]
            before = [None if part is None else _number(part, arrived) for part in row.before]
            factors = (word_of(f"part {number}") | 1 for number in range(len(parts)))
            digest = sum(f * p for f, p in zip(factors, parts, strict=False))
            digests.append(signed(parts[0] if len(parts) == 1 else digest))
            pairs = zip(parts, before, row.reduced, strict=False)
            unchanged.append(
                row.kind is StateKind.REDUCED
                and all(not reduced or part == old for part, old, reduced in pairs)
            )
        state = StateDigests(
            tuple(row.kind for row in self._rows),
            tuple(row.name for row in self._rows),
            np.array(digests, np.int64),
            np.array(unchanged, bool),
        )
        values: dict[str, float | int] = {}
        if self._layout is not None:
            values["state_layout"] = self._layout
        for kind, column in _COLUMNS.items():
            of_kind = state.of_kind(kind) if kind in self._seen else None
            if of_kind is not None:
                values[column] = of_kind
        reduced, applied = (sum(_squares(norms, arrived)) for norms in self._norms)
        if {StateKind.REDUCED, StateKind.APPLIED} <= self._seen and 0 < reduced < math.inf:
            values["applied_scale"] = math.sqrt(applied / reduced)
        return state, values

    def _tensors(self) -> Iterator[Tensor]:
        """Yield what lies on a device, in the order in which it is read."""
        for row in self._rows:
            for digest in (*row.parts, *row.before):
                if digest is not None and digest.pending:
                    yield from (tensor for _, tensor in digest.pending)
        for norms in self._norms:
            yield from (norm for norm in norms if isinstance(norm, Tensor))

    def _arrived(self) -> dict[torch.device, Iterator[Any]]:
        return {device: iter(copy.numpy()) for device, copy in self._copies.items()}


class StateMeter:
    """Digests some of a model's state in every step; all calls come on the training thread.

    No call waits for the device, raises, or changes anything. What cannot be read has a digest
    of its own, and a gradient that is missing has the digest 0.

    Args:
        module: The model, without what wraps it for data parallelism.
        optimizer: The optimizer; None if it is not known, or if its state is not replicated.
        replicated: Whether workers hold the same parameters; if not, only buffers are compared.
        reduces: Tells whether the gradient of a parameter is reduced at all; None if all are.
        left_out: Names of parameters and buffers that each worker may have for itself.
        lasting: Tells what lasts of a parameter that is replaced while the model computes, and
            which parameters each worker may have for itself; None if all that hangs in it lasts.
        max_items: Digests of a step, at most.
        turns: Steps within which everything has its turn.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        replicated: bool,
        reduces: Callable[[Tensor], bool] | None = None,
        left_out: Container[str] = (),
        lasting: Lasting | None = None,
        max_items: int = 32,
        turns: int = 64,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._reduces = reduces
        self._left_out = left_out
        self._lasting = lasting
        called = optimizer is not None
        self._new_plan = partial(
            Plan, replicated=replicated, called=called, turns=turns, max_items=max_items
        )
        self._plan: Plan | None = None
        self._told = False
        self._items: list[Item] = []
        self._wanted: dict[str, list[tuple[int, int, Slice]]] = {}
        self._local: dict[tuple[int, int], PendingDigest] = {}
        self._digests: dict[StateKind, list[list[PendingDigest]]] = {}
        self._norms = GradientNorms(len(_MOMENTS))
        prepare()

    def begin_step(self, step: int) -> None:
        """Choose what to read in a step, at its first forward pass."""
        self._clear()
        self._norms.take()
        try:
            if self._plan is None or step % self._plan.length == 0:
                self._make_plan()
            assert self._plan is not None
            self._items = self._plan.chosen(step)
        except Exception as error:  # a model that cannot be listed
            self._tell(error)
            return
        for number, item in enumerate(self._items):
            if StateKind.REDUCED in item.kinds:
                for index, part in enumerate(item.slices):
                    self._wanted.setdefault(part.place.name, []).append((number, index, part))

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, before the reduction; the last one counts.

        Args:
            name: The parameter's canonical name.
            gradient: Any shape; it may be overwritten as soon as this returns.
        """
        for number, index, part in self._wanted.get(name, ()):
            self._local[number, index] = self._digest(gradient, part)

    def see_reduced(self) -> None:
        """Read gradients right after the reduction."""
        self._read_gradients(StateKind.REDUCED)

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run; its first call counts."""
        if self._optimizer is not None and StateKind.APPLIED not in self._digests:
            self._read_gradients(StateKind.APPLIED)

    def see_state(self) -> None:
        """Read parameters, buffers and the optimizer's state, after the step."""
        for kind in _STATE:
            read = self._read_optimizer if kind is StateKind.OPTIMIZER else self._read_tensor
            self._digests[kind] = [
                [read(part) for part in item.slices] if kind in item.kinds else []
                for item in self._items
            ]

    def collect(self) -> PendingState:
        """Return what was read since the step began, without waiting, and begin anew."""
        layout = None if self._plan is None else self._plan.layout
        try:
            pending = PendingState(list(self._rows()), self._digests, self._norms.take(), layout)
        except Exception as error:  # of the copy to the host
            self._tell(error)
            pending = PendingState([], (), [[], []], layout)
        self._clear()
        return pending

    def _clear(self) -> None:
        self._items = []
        self._wanted.clear()
        self._local, self._digests = {}, {}

    def _make_plan(self) -> None:
        found = survey(self._module, self._optimizer, self._left_out, self._lasting)
        if self._plan is None or found != self._plan.found:
            self._plan = self._new_plan(found)

    def _rows(self) -> Iterator[_Row]:
        for number, item in enumerate(self._items):
            for kind in item.kinds:
                if kind in self._digests:
                    parts = self._digests[kind][number]
                elif kind in _STATE:
                    continue  # the step was cut short
                else:
                    parts = [PendingDigest() for _ in item.slices]
                before: list[PendingDigest | None] = []
                reduced: list[bool] = []
                if kind is StateKind.REDUCED:
                    before = [self._local.get((number, i)) for i in range(len(parts))]
                    reduced = [self._is_reduced(part) for part in item.slices]
                yield _Row(kind, item.name, parts, before, reduced)

    def _is_reduced(self, part: Slice) -> bool:
        if self._reduces is None:
            return True
        parameter = part.place.current(self._lasting)
        return parameter is None or self._reduces(parameter)

    def _read_gradients(self, kind: StateKind) -> None:
        moment = _MOMENTS.index(kind)
        self._norms.begin(moment)
        self._digests[kind] = [
            [self._read_gradient(part, moment) for part in item.slices]
            if kind in item.kinds
            else []
            for item in self._items
        ]
        try:
            self._norms.end(moment)
        except Exception as error:  # as of a single gradient
            self._norms.spoil(moment)
            self._tell(error)

    def _read_gradient(self, part: Slice, moment: int) -> PendingDigest:
        parameter = part.place.current(self._lasting)
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return PendingDigest()
        try:
            self._norms.add(moment, gradient, part)
        except Exception as error:  # whatever kind of tensor it is
            self._norms.spoil(moment)
            self._tell(error)
        return self._digest(gradient, part)

    def _read_tensor(self, part: Slice) -> PendingDigest:
        tensor = part.place.current(self._lasting)
        return PendingDigest() if tensor is None else self._digest(tensor, part)

    def _read_optimizer(self, part: Slice) -> PendingDigest:
        parameter = part.place.current(self._lasting)
        if parameter is None:
            return PendingDigest()
        try:
            return digest_optimizer(self._optimizer, parameter, part)
        except Exception as error:  # whatever an optimizer keeps
            self._tell(error)
            return _UNREADABLE

    def _digest(self, tensor: Tensor, part: Slice) -> PendingDigest:
        try:
            return digest_bits(tensor, part.start, part.stop)
        except Exception as error:  # whatever kind of tensor it is
            self._tell(error)
            return _UNREADABLE

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "some of the model's or the optimizer's state cannot be read, and is not compared "
                "between workers: %s: %s",
                type(error).__name__,
                error,
            )


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int64 else tensor.double().view(torch.int64)


def _number(digest: PendingDigest, arrived: dict[torch.device, Iterator[Any]]) -> int:
    pending = (factor * int(next(arrived[tensor.device])) for factor, tensor in digest.pending)
    return signed(digest.known + sum(pending))


def _squares(
    norms: Sequence[float | Tensor], arrived: dict[torch.device, Iterator[Any]]
) -> Iterator[float]:
    for norm in norms:
        if isinstance(norm, Tensor):
            yield float(next(arrived[norm.device]).view(np.float64))
        else:
            yield norm
