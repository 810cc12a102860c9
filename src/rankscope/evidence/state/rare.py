"""What a model's own tensors show by themselves, in a few steps: adapters, shards, counts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.probe import Awaited, Job, MessagePart, Probe, RareProbe, Ready, StepEnd
from rankscope.bus.words import dtype_name
from rankscope.evidence.state.plan import held_tensor
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.labels import own
from rankscope.wrappers.optimizers import held_names
from rankscope.wrappers.passes import tensors_in

_MOST_LEVELS = 3  # from a factor's own module up to the one that holds the matrix, too

_ELEMENTS = 16  # of each shard
_MOST_MATRICES = 64

_TYPES = (torch.bfloat16, torch.float16)  # of counts
_READINGS = 3  # that show one number for each token
_CLOSE = 0.01  # relative, of this number: sums of rounded counts
_MOST_ELEMENTS = 1 << 12

_MOST_NORMS = 64  # that are read


def adapted_matrices(parameters: Mapping[str, Tensor], trained: Sequence[str]) -> list[str]:
    """Return the trained matrices to which an adapter is added, by name.

    There are none where no other matrix is frozen: all of the model is trained on purpose then.
    ``parameters`` are those of the model as they begin.
    """
    matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and not p.is_meta}
    if all(name in trained for name in matrices):
        return []
    updated = {name: matrices[name] for name in trained if name in matrices}
    with torch.no_grad():
        zero = [name for name, matrix in updated.items() if not own(matrix.detach()).any()]
    return sorted({base for name in zero for base in _bases_of(name, updated)})


def _bases_of(zero: str, updated: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the matrices in the smallest part of the model that has the adapter's other factor."""
    scope = zero
    for _ in range(_MOST_LEVELS):
        scope = scope.rpartition(".")[0]
        inside = [n for n in updated if n != zero and n.startswith(f"{scope}." if scope else "")]
        pairs = [(factor, _product(updated[zero], updated[factor])) for factor in inside]
        bases = [
            base
            for factor, shapes in pairs
            for base in inside
            if base != factor and tuple(updated[base].shape) in shapes
        ]
        if any(shapes for _, shapes in pairs) or not scope:
            yield from bases
            return


def _product(one: Tensor, other: Tensor) -> set[tuple[int, int]]:
    """Return the shapes of the products of two matrices, in either order, of a low rank."""
    orders = ((one.shape, other.shape), (other.shape, one.shape))
    return {
        (left[0], right[1])
        for left, right in orders
        if left[1] == right[0] and 2 * left[1] <= min(left[0], right[1])
    }


class AdapterProbe(Probe):
    """Finds matrices that an adapter is added to and that are trained as well, in the first step.

    A low-rank adapter of a matrix ``W [o, i]`` is a pair ``[r, i]``, ``[o, r]`` with a small ``r``
    (or both transposed), one of which begins at zero, so that it changes nothing at first. It is
    trained in place of ``W``, which stays frozen.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the names once."""
        names, self._names = self._names, []
        return Ready(MessagePart(names={"adapted": names})) if names else None


def make_adapter_probe(job: Job) -> AdapterProbe | None:
    """Return the probe of adapters; None where the optimizer does not hold the parameters."""
    if getattr(job.optimizer, "param_groups", None) is None:
        return None
    parameters = job.wrapped.every_parameter()
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    names = adapted_matrices(parameters, held_names(job.optimizer, trained))
    return AdapterProbe(names) if names else None


class ShardsProbe(RareProbe):
    """Reads the first elements of sharded matrices before a session's first update.

    Each rank that draws its own shard from the same seed draws what the others draw: a matrix then
    consists of copies of its first rows. A matrix may repeat its rows on purpose, as experts do
    that begin as copies of one, but not every matrix of a model.
    """

    def __init__(self, matrices: Sequence[tuple[str, DTensor]], first_step: int) -> None:
        super().__init__(first_step, last=0)
        self._matrices = matrices

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read them before the first forward pass."""
        if not self.due or not first:
            return
        some = [(n, m) for n, m in self._matrices if own(m).numel() >= _ELEMENTS][:_MOST_MATRICES]
        if some:
            rows = [own(matrix).reshape(-1)[:_ELEMENTS].float() for _, matrix in some]
            copy = HostCopy(torch.stack(rows), own=True)
            names = [(name, _place_of(matrix)) for name, matrix in some]
            self.pending = Awaited([copy], partial(_read_starts, names, copy))


def _read_starts(names: Sequence[tuple[str, str]], copy: HostCopy) -> MessagePart:
    """Return what each shard begins with, without those that begin with a constant."""
    starts_ME = copy.numpy().astype(np.float32)
    vary_M = np.ptp(starts_ME, axis=1) > 0
    rows = zip(names, starts_ME, strict=True)
    found = [
        [name, place, digest_of(row.tobytes())] for (name, place), row in compress(rows, vary_M)
    ]
    return MessagePart(names={"shards": found} if found else {})


def _place_of(matrix: DTensor) -> str:
    """Return this rank's place along the axes over which a matrix is divided."""
    coordinate = matrix.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, matrix.placements, strict=True)
    return " ".join(str(at) for at, placement in placed if not placement.is_replicate())


def make_shards_probe(job: Job) -> ShardsProbe | None:
    """Return the probe of sharded matrices; None where there are none."""
    if not job.wrapped.sharded:
        return None
    held: dict[str, Tensor] = job.wrapped.parameters
    matrices = [(n, p) for n, p in held.items() if isinstance(p, DTensor) and p.dim() > 1]
    return ShardsProbe(matrices, job.first_step) if matrices else None


def _is_count(for_each: Sequence[float]) -> bool:
    number = round(for_each[0]) if math.isfinite(for_each[0]) else 0
    alike = all(abs(one - number) <= _CLOSE * number for one in for_each)
    return number > 0 and alike and len(for_each) >= _READINGS


class CountsProbe(RareProbe):
    """Reads small buffers of 16 bits around forward passes, which may count in them.

    To such buffers a forward pass adds, and large ones are rounded. What it adds is a count of
    tokens if no element falls, and the sum is a whole number for each token, the same in all
    readings: tokens per expert, of which each token takes two, for example. From 256 on, bfloat16
    holds no odd number, float16 none from 2,048 on.
    """

    def __init__(self, buffers: Mapping[str, tuple[nn.Module, str]], first_step: int) -> None:
        super().__init__(first_step)
        self._buffers = buffers
        self._num_tokens = 0
        self._known: dict[str, list[float]] = {}  # added for each token, in all readings so far

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Note the number of tokens in the forward pass, where it is due."""
        if not self.due:
            return
        tokens = (t for t in tensors_in([args, kwargs]) if not t.is_floating_point())
        self._num_tokens = next((tensor.numel() for tensor in tokens), 0)

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the buffers before the step's first forward pass, where it is due."""
        if first and self.due:
            present = self._present()
            self.before = {name: (buffer._version, _copy(buffer)) for name, buffer in present}

    def after_forward(self) -> None:
        """Read those that the forward pass has changed."""
        before, self.before = self.before, None
        changes = {
            name: (before[name][1], _copy(buffer))
            for name, buffer in (self._present() if before else ())
            if name in before and before[name][0] != buffer._version
        }
        if changes and self._num_tokens:
            copies = [copy for ends in changes.values() for copy in ends]
            self.pending = Awaited(copies, partial(self._read, changes, self._num_tokens))

    def _read(
        self, changes: Mapping[str, tuple[HostCopy, HostCopy]], num_tokens: int
    ) -> MessagePart:
        """Wait for the device; return each count: name, largest value, whether it began at 0."""
        found = []
        for name, ends in changes.items():
            before, after = (copy.numpy().astype(np.float64) for copy in ends)
            added = after - before
            each = float(added.sum()) / num_tokens if (added >= 0).all() else math.nan
            self._known.setdefault(name, []).append(each)
            largest = float(abs(after).max())
            if _is_count(self._known[name]) and largest < math.inf:
                found.append([name, int(largest), not before.any()])
        return MessagePart(names={"counts": found} if found else {})

    def _present(self) -> list[tuple[str, Tensor]]:
        found = [
            (name, held_tensor(module._buffers, key))
            for name, (module, key) in self._buffers.items()
        ]
        return [(name, b) for name, b in found if type(b) is Tensor and b.dtype in _TYPES]


def _copy(buffer: Tensor) -> HostCopy:
    return HostCopy(buffer.detach().float(), own=True)


def make_counts_probe(module: nn.Module, first_step: int) -> CountsProbe | None:
    """Return the probe of a model's counts; None where it has no buffers of 16 bits."""
    buffers = {
        f"{canonical_name(f'{prefix}.{key}'.lstrip('.'))} in {dtype_name(buffer.dtype)}": (
            part,
            key,
        )
        for prefix, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor and buffer.dtype in _TYPES and buffer.numel() <= _MOST_ELEMENTS
    }
    return CountsProbe(buffers, first_step) if buffers else None


class RecomputedProbe(RareProbe):
    """Reads how many batches normalisations have counted, around backward passes.

    Activation checkpointing runs a part's forward pass once more in the backward pass.
    Normalisations over batches in it then count each batch twice.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]], first_step: int) -> None:
        super().__init__(first_step)
        self._norms = norms

    def after_forward(self) -> None:
        """Read them at the end of a forward pass; the step's last one counts."""
        if self.due:
            self.before = self._counts()

    def see_reduced(self) -> None:
        """Read them at the end of the backward pass."""
        before, self.before = self.before, None
        after = None if before is None else self._counts()
        if before is not None and after is not None:
            self.pending = Awaited([before, after], partial(self._read, before, after))

    def _read(self, before: HostCopy, after: HostCopy) -> MessagePart:
        """Wait for the device; return the names of the normalisations that have moved."""
        moved = before.numpy() != after.numpy()
        names = [name for (name, _), is_moved in zip(self._norms, moved, strict=True) if is_moved]
        return MessagePart(names={"recomputed": names} if names else {})

    def _counts(self) -> HostCopy | None:
        buffers = [module._buffers.get("num_batches_tracked") for _, module in self._norms]
        counts = [buffer.detach().reshape(()) for buffer in buffers if buffer is not None]
        return HostCopy(torch.stack(counts), own=True) if len(counts) == len(buffers) else None


def make_recomputed_probe(module: nn.Module, first_step: int) -> RecomputedProbe | None:
    """Return the probe of a model's running statistics; None where it has none."""
    norms = [
        (canonical_name(name), part)
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and isinstance(part.num_batches_tracked, Tensor)
    ]
    return RecomputedProbe(norms[:_MOST_NORMS], first_step) if norms else None
