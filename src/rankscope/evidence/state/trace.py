"""A trace of a training: every parameter after each step, every gradient after its reduction.

``rankscope diff`` compares the traces of two runs tensor by tensor: digest, norm and sketch. So
each depends on a tensor's bits and name alone, not on the seed of a run, its groups or its other
tensors. A tensor is cut into pieces; the sketch of each is taken at full width in float32 and
folded in float64, so that rounding stays near 1e-7 of the tensor's norm, however large it is.
Nothing waits for the device.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from rankscope.bus.probe import Awaited, MessagePart, Pending, Probe, StepEnd
from rankscope.bus.replicas import TRACE_WIDTH, StateKind, TensorTrace
from rankscope.evidence.state.plan import Slice, TensorPlace, digest_optimizer
from rankscope.evidence.state.readings import UNREADABLE, PendingDigests, PendingReading
from rankscope.gradients.digest import PendingDigest
from rankscope.gradients.host import HostCopy
from rankscope.gradients.kernels import choose_kernel
from rankscope.gradients.kernels.flat import flat_parts, has_memory
from rankscope.gradients.kernels.interface import ParameterSigns, period_signs
from rankscope.gradients.names import canonical_name
from rankscope.gradients.sketch import DEFAULT_WIDTH
from rankscope.gradients.totals import GradientTotals, fold

DigestRow = tuple[StateKind, str, PendingDigest]
"""A tensor's kind, its name, and its digest, which a device may still compute."""

PendingRows = Awaited[TensorTrace]
"""Rows of a trace on their way to the host."""

_SEED = 0  # of the signs, whatever the seed of the run
_ROWS = 64  # pieces that are folded at once
_PIECE = {"cpu": 1 << 18}  # elements: 64 sums for each number of the wide sketch
_PIECE_ACCELERATOR = 1 << 26  # its kernel adds up in many short sums, and starts slowly
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)

_log = logging.getLogger("rankscope")


class TraceReader:
    """Reads tensors without waiting for their device, in scratch space of a fixed size.

    Calls on one accelerator must follow one another on its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel = choose_kernel(device, DEFAULT_WIDTH, period_signs(_SEED))
        self._signs: dict[str, ParameterSigns] = {}
        self._scratch = GradientTotals.zeros(_ROWS, DEFAULT_WIDTH, device)
        self._piece = _PIECE.get(device.type, _PIECE_ACCELERATOR)
        self._logged = False

    @torch.no_grad()
    def read(
        self, tensors: Iterable[tuple[StateKind, str, Tensor]], digests: Iterable[DigestRow] = ()
    ) -> PendingRows:
        """Start to read tensors as they are now."""
        rows: list[tuple[StateKind, str]] = []
        reading = PendingDigests()
        owners: list[int] = []
        folded: list[Tensor] = []
        squares: list[Tensor] = []
        self._scratch.reset()
        used = 0
        for kind, name, tensor in tensors:
            number = len(rows)
            rows.append((kind, name))
            try:
                reading.add(tensor)
            except Exception as error:  # a tensor of an unusual kind
                self._log_once(error)
                reading.add_unreadable()
            for position, piece in self._pieces(tensor):
                if used == _ROWS:
                    self._empty(used, folded, squares)
                    used = 0
                self._measure(name, piece, position, used)
                owners.append(number)
                used += 1
        self._empty(used, folded, squares)
        num_read = len(rows)
        for kind, name, digest in digests:
            rows.append((kind, name))
            reading.add_digest(digest)
        copies = reading.begin(), HostCopy(torch.cat(folded)), HostCopy(torch.cat(squares))
        places_P = np.array(owners, np.int64)
        return Awaited(copies, partial(_read_rows, rows, num_read, places_P, *copies))

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield position and elements of a tensor's pieces; None for unreadable elements."""
        try:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if not _lies_in_memory(tensor, self._device):
                yield 0, None
                return
            for position, flat in flat_parts(tensor):
                for start in range(0, len(flat), self._piece):
                    yield position + start, flat[start : start + self._piece].contiguous()
        except Exception as error:  # a tensor of an unusual kind
            self._log_once(error)
            yield 0, None

    def _measure(self, name: str, piece: Tensor | None, position: int, row: int) -> None:
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = ParameterSigns(name, _SEED, self._device)
        try:
            if piece is not None:
                first = signs.first % DEFAULT_WIDTH + position
                self._kernel.measure(piece, signs, first, self._scratch, row)
                return
        except Exception as error:  # a tensor of an unusual type
            self._log_once(error)
        self._scratch.squared_norms[row] = math.nan

    def _empty(self, used: int, folded: list[Tensor], squares: list[Tensor]) -> None:
        """Fold the first rows of the scratch space, and clear it."""
        folded.append(fold(self._scratch.sketches[:used].double(), TRACE_WIDTH, _SEED))
        squares.append(self._scratch.squared_norms[:used].clone())
        self._scratch.reset()

    def _log_once(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            _log.debug("some tensors cannot be traced: %s", error)


def _read_rows(
    rows: list[tuple[StateKind, str]],  # kind and name of each tensor
    num_read: int,  # how many of them were read in pieces; the others have a digest only
    owners_P: NDArray[np.int64],  # row to which each of P pieces belongs
    reading: PendingReading,
    sketches: HostCopy,  # float64 ``[P, k]``
    squared_norms: HostCopy,  # float64 ``[P]``
) -> TensorTrace:
    """Wait for the device."""
    sketches_NK = np.zeros((len(rows), TRACE_WIDTH))
    squares_N = np.zeros(len(rows))
    np.add.at(sketches_NK, owners_P, sketches.numpy())
    np.add.at(squares_N, owners_P, squared_norms.numpy())
    squares_N[num_read:] = math.nan
    digests, _ = reading.read()
    with np.errstate(over="ignore", invalid="ignore"):  # of a gradient that has overflown
        narrow_NK = sketches_NK.astype(np.float32)
    return TensorTrace(
        tuple(kind for kind, _ in rows),
        tuple(name for _, name in rows),
        np.array(digests, np.uint64).view(np.int64),
        np.sqrt(squares_N),
        narrow_NK,
    )


def _lies_in_memory(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the elements of a tensor can be read at its address on a device."""
    if type(tensor) not in _ORDINARY or tensor.device != device or is_lazy(tensor):
        return False
    return tensor.layout != torch.strided or has_memory(tensor)  # else its parts are copied


def _read_trace(rows: Sequence[PendingRows], initial: PendingRows | None) -> MessagePart:
    """Wait for the device; the trace of the initial model, if any, comes first."""
    own = _joined([each.read() for each in rows])
    traces = {"initial": initial.read(), "own": own} if initial is not None else {"own": own}
    columns: tuple[tuple[str, str, type[np.generic]], ...] = (
        ("traced_digests_N", "digests_N", np.int64),
        ("traced_norms_N", "norms_N", np.float64),
        ("traced_sketches", "sketches_NK", np.float32),
    )
    arrays = {
        name: b"".join([getattr(one, field).astype(dtype).tobytes() for one in traces.values()])
        for name, field, dtype in columns
    }
    names = {what: [list(map(str, one.kinds)), list(one.names)] for what, one in traces.items()}
    return MessagePart(arrays=arrays, names={"traced": names})


class TraceMeter(Probe):
    """Traces a training on one rank; all calls come on the training thread, none waits."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],  # that are trained, by name, whole on this rank
        device: torch.device,
        optimizer: torch.optim.Optimizer | None,  # its state at the start is digested
        *,
        every: int,  # steps that are multiples of this are traced
        leave_out: Callable[[float], None],  # takes seconds that do not count as overhead
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._every = every
        self._leave_out = leave_out
        self._reader = TraceReader(device)
        self._step = -1
        self._due = False
        self._begun = False  # the model as it was at the start has been read
        self._initial: PendingRows | None = None
        self._reduced: PendingRows | None = None
        self._since_reduced = 0.0
        self.busy_seconds = 0.0
        """Seconds that this rank alone spent on tracing between the last two reductions."""

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Begin a step, unless it has begun already; before its first forward pass."""
        if self._step == step:
            return
        self._step = step
        self._due = step % self._every == 0 and not paused
        if not self._begun:
            self._begun = True
            start = time.perf_counter()
            self._initial = self._reader.read(self._state(), self._remembered())
            self._leave_out(self._spent(start))

    def see_reduced(self) -> None:
        """Read the gradients right after the reduction; the last call in a step counts."""
        self.busy_seconds = self._since_reduced
        self._since_reduced = 0.0
        if not self._due:
            return
        start = time.perf_counter()
        gradients = (
            (StateKind.REDUCED, name, parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        )
        self._reduced = self._reader.read(gradients)
        self._leave_out(self._spent(start))

    def collect(self, end: StepEnd) -> Pending | None:
        """Read the parameters after the step; return its trace, if any."""
        end.busy_seconds -= self.busy_seconds
        if not end.comparable:
            self.abort()
        start = time.perf_counter()
        rows = []
        if self._due and self._reduced is not None:
            trained = ((StateKind.PARAMETER, *each) for each in self._parameters.items())
            rows = [self._reduced, self._reader.read(trained)]
        initial, self._initial = self._initial, None
        self.abort()
        end.leave_out(self._spent(start))
        if not rows and initial is None:
            return None
        return Awaited([initial, *rows], partial(_read_trace, rows, initial))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._reduced = None
        self._step = -1
        self._due = False

    def _spent(self, start: float) -> float:
        seconds = time.perf_counter() - start
        self._since_reduced += seconds
        return seconds

    def _state(self) -> Iterator[tuple[StateKind, str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield StateKind.PARAMETER, canonical_name(name), parameter
        for name, buffer in self._module.named_buffers():
            yield StateKind.BUFFER, canonical_name(name), buffer

    def _remembered(self) -> Iterator[DigestRow]:
        """Yield digests of the optimizer state of each parameter that has some."""
        for name, parameter in self._parameters.items():
            whole = Slice(TensorPlace(name, self._module, "", is_buffer=False), parameter.numel())
            try:
                digest = digest_optimizer(self._optimizer, parameter, whole)
            except Exception:  # unusual optimizer state
                digest = PendingDigest(UNREADABLE)
            if digest.known or digest.pending:
                yield StateKind.OPTIMIZER, name, digest


def _joined(traces: list[TensorTrace]) -> TensorTrace:
    if not traces:
        return TensorTrace(
            (), (), np.empty(0, np.int64), np.empty(0), np.empty((0, TRACE_WIDTH), "f4")
        )
    return TensorTrace(
        tuple(kind for trace in traces for kind in trace.kinds),
        tuple(name for trace in traces for name in trace.names),
        np.concatenate([trace.digests_N for trace in traces]),
        np.concatenate([trace.norms_N for trace in traces]),
        np.concatenate([trace.sketches_NK for trace in traces]),
    )
