"""Sketches and norms of a rank's parts of tensors, such that all ranks' add up to the whole."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.bus.groups import Groups, Range, Sections
from rankscope.bus.parity import QUARTERS, WIDTH, TensorFigures
from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.wrappers.fsdp2_model import Shard, ShardPlace, measure_shards
from rankscope.wrappers.labels import labels_in, own

if TYPE_CHECKING:
    from rankscope.stats.arrays import Ints


class Part(NamedTuple):
    """A rank's part of a tensor."""

    tensor: Tensor  # the part, an ordinary tensor
    shape: tuple[int, ...]
    first: tuple[int, ...]  # index of its first element in each dimension
    terms: str = ""  # which of several terms of a sum it is; empty where it is no term

    @property
    def place(self) -> str:
        """Where it lies, in words that are equal for copies of the same part."""
        if not self.terms and tuple(self.tensor.shape) == self.shape:
            return ""
        return f"{','.join(map(str, self.first))}+{','.join(map(str, self.tensor.shape))}" + (
            f" term {self.terms}" if self.terms else ""
        )


def part_of(tensor: Tensor | Part) -> Part:
    """Return this rank's part of a tensor; all of a plain one; ValueError for other layouts."""
    if isinstance(tensor, Part):
        return tensor
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        whole = tensor.to_dense() if tensor.is_sparse else tensor
        return Part(whole, tuple(whole.shape), (0,) * whole.dim())
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    view = torch.empty(shape, device="meta")
    terms = []
    # A strided shard is cut from the shard of the axes behind it: FSDP2 of tensor parallelism.
    strided = [getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements]
    axes = sorted(enumerate(tensor.placements), key=lambda at: strided[at[0]])
    for axis, placement in axes:
        if placement.is_partial():
            terms.append(f"{axis}:{mesh.get_local_rank(axis)}")
        elif placement.is_shard() or strided[axis]:
            dim = placement.dim  # type: ignore[attr-defined]
            parts = view.chunk(mesh.size(axis), dim)
            index = mesh.get_local_rank(axis)
            view = parts[index] if index < len(parts) else view.narrow(dim, 0, 0)
        elif not placement.is_replicate():
            raise ValueError(f"a tensor is laid out over a mesh as {placement}, not by parts")
    local = tensor.to_local()
    if local.shape != view.shape:
        raise ValueError(f"expected a part of shape {tuple(view.shape)}, got {tuple(local.shape)}")
    return Part(local, shape, _first(view, shape), " ".join(terms))


def _first(view: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of a view's first element in a contiguous tensor of a shape."""
    at = view.storage_offset() if view.numel() else 0
    first = []
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :])
        first.append(at // stride)
        at %= stride
    return tuple(first)


def as_shard(part: Part) -> tuple[Tensor, ShardPlace] | None:
    """Return a part as one that is cut in a single dimension; None of a whole tensor.

    Where several dimensions are cut, zeros take the place of what lies beside the part in all but
    the first of them.
    """
    local = part.tensor
    cut = [
        d for d, (own, all_) in enumerate(zip(local.shape, part.shape, strict=True)) if own != all_
    ]
    if not cut:
        return None
    first, *others = cut
    for dim in others:
        size = list(local.shape)
        size[dim] = part.shape[dim]
        padded = local.new_zeros(size)
        padded.narrow(dim, part.first[dim], local.shape[dim]).copy_(local)
        local = padded
    return local.contiguous(), ShardPlace(part.shape, first, part.first[first])


Named = tuple[str, Tensor | Part]

_AT_ONCE = 1 << 22  # elements that are read in one call


class FigureMeter:
    """Measures tensors of known names and sizes.

    ``sizes``: elements of each whole tensor, by name; complex ones count twice. ``placed`` returns
    the name and place under which a part is measured.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        placed: Callable[[str, Part], tuple[str, Part]] = lambda name, part: (name, part),
    ) -> None:
        self._placed = placed
        names = tuple(sizes)
        self._row = {name: number for number, name in enumerate(names)}
        ranges = {name: _quarters(self._row[name], size) for name, size in sizes.items()}
        lengths = [0] * (QUARTERS * len(names))
        for each in ranges.values():
            for piece in each:
                lengths[piece.section] += piece.stop - piece.start
        group_of = tuple(number for number in range(len(names)) for _ in range(QUARTERS))
        groups = Groups(names, self._row)
        sections = Sections(names, group_of, tuple(lengths), ranges)
        self._sketcher = Sketcher(device, groups, WIDTH, seed=0, sections=sections)

    def measure(self, tensors: Iterable[Named]) -> TensorFigures:
        """Return the figures of tensors, of those whose names are known; waits for the device.

        A few million elements are read at once: tensors that are made for it, such as differences,
        take no more memory than that.
        """
        totals = self._sketcher.new_totals()
        wholes: list[Measured] = []
        shards: list[Shard] = []
        places: dict[str, str] = {}
        waiting = 0
        for given, tensor in tensors:
            name, part = self._placed(given, part_of(tensor))
            if name not in self._row:
                continue
            number = part.tensor.is_floating_point() or part.tensor.is_complex()
            if not (number and part.tensor.numel()):
                continue
            known = places.get(name)  # of another part of the same tensor
            places[name] = part.place if known is None else f"{known} {part.place}"
            shard = as_shard(part)
            if shard is None:
                wholes.append((name, part.tensor.contiguous(), 0))
            else:
                shards.append((name, *shard))
            waiting += part.tensor.numel()
            if waiting >= _AT_ONCE:
                self._read(wholes, shards, totals)
                waiting = 0
        self._read(wholes, shards, totals)
        rows = [self._row[name] for name in places]
        sketches = totals.sketches.cpu().numpy().reshape(-1, QUARTERS, WIDTH)
        squares = totals.squared_norms.cpu().numpy().reshape(-1, QUARTERS)
        return TensorFigures(
            tuple(places),
            tuple(places.values()),
            np.array(squares[rows], np.float64),
            np.array(sketches[rows], np.float32),
        )

    @torch.no_grad()
    def _read(self, wholes: list[Measured], shards: list[Shard], into: GradientTotals) -> None:
        """Add what waits to totals, and drop it."""
        self._sketcher.measure_many(wholes, into)
        measure_shards(self._sketcher, shards, into)
        wholes.clear()
        shards.clear()

    def differences(
        self, after: Sequence[Named], before: Mapping[str, Tensor | Part]
    ) -> TensorFigures:
        """Return the figures of ``after - before``, in float32 or the tensors' wider type.

        They take the place of ``before``.
        """
        return self.measure((name, _difference(now, before[name])) for name, now in after)


def _difference(now: Tensor | Part, before: Tensor | Part) -> Part:
    part = part_of(now)
    own = part_of(before).tensor
    if own.dtype in (torch.float16, torch.bfloat16):
        return part._replace(tensor=part.tensor.float().sub_(own))
    return part._replace(tensor=torch.sub(part.tensor, own, out=own))


def _quarters(row: int, size: int) -> tuple[Range, ...]:
    ends = [size * (part + 1) // QUARTERS for part in range(QUARTERS)]
    starts = [0, *ends[:-1]]
    found = [
        Range(QUARTERS * row + part, start, end)
        for part, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    return tuple(found) or (Range(QUARTERS * row, 0, size),)


_MOST_NODES = 96
_MIX = np.uint64(0x9E3779B97F4A7C15)
_BITS = (1 << 62) - 1
_INTEGERS_OF = {
    **{kind: kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)},
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


class Labels(NamedTuple):
    """Label tokens, whatever their order."""

    num_tokens: int = 0
    digest: int = 0  # a sum over them, modulo 2^62: equal multisets have equal sums

    def plus(self, other: "Labels") -> "Labels":
        """Return both together."""
        return Labels(self.num_tokens + other.num_tokens, (self.digest + other.digest) & _BITS)


def labels_before(roots: Iterable[Tensor]) -> Labels | None:
    """Return the targets of the cross entropies behind some losses; None where there are none."""
    waiting: deque[Any] = deque(root.grad_fn for root in roots)
    seen: set[Any] = set()
    found = None
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith("NllLoss"):
            labels = _targets_of(node)
            if labels is not None:
                found = labels if found is None else found.plus(labels)
            continue
        waiting.extend(before for before, _ in node.next_functions)
    return found


def labels_among(inputs: Mapping[str, Any], *, shifted: bool) -> Labels | None:
    """Return the label tokens in a model's inputs; None without ``labels`` or ``shift_labels``."""
    labels, first = labels_in(inputs, shifted=shifted)
    if labels is None or labels.is_floating_point():
        return None
    return _counted(own(labels[..., first:]), IGNORED_LABEL)


def elements_among(args: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Labels]:
    """Return all elements of each matrix that a model is given, by its name or number.

    Masks of booleans do not count, nor do matrices that are too large to be read at each step.
    """
    named = {**{str(number): value for number, value in enumerate(args)}, **inputs}
    found = {}
    for name, value in named.items():
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        plain = value.layout is torch.strided and value.dtype in _INTEGERS_OF
        if plain and value.dim() >= 2 and 0 < value.numel() <= _AT_ONCE:
            bits = value.detach().contiguous().view(_INTEGERS_OF[value.dtype]).cpu().numpy()
            found[name] = _mixed(bits.reshape(-1).astype(np.int64))
    return found


def _targets_of(node: Any) -> Labels | None:
    packed = getattr(node, "_raw_saved_target", None)
    if getattr(packed, "unpack_hook", None) is not None:
        return None  # only the training may unpack it
    try:
        target = node._saved_target
        ignored = node._saved_ignore_index
    except (AttributeError, RuntimeError):  # freed, or changed in place since
        return None
    if not isinstance(target, Tensor) or isinstance(target, DTensor) or target.is_floating_point():
        return None
    signed = ignored - (1 << 64) if ignored >= 1 << 63 else ignored  # as autograd shows it
    return _counted(target.detach(), int(signed))


def _counted(target: Tensor, ignored: int) -> Labels:
    values: Ints = target.reshape(-1).cpu().numpy().astype(np.int64)
    return _mixed(values[values != ignored])


def _mixed(values: "Ints") -> Labels:
    mixed = (values.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    mixed ^= mixed >> np.uint64(32)
    return Labels(len(values), int(mixed.sum(dtype=np.uint64)) & _BITS)
