"""Sketches and norms of a rank's parts of tensors, such that all ranks' add up to the whole."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rankscope.bus.groups import Groups, Range, Sections
from rankscope.bus.parity import QUARTERS, WIDTH, TensorFigures
from rankscope.evidence.parity.place import Part, as_shard, part_of
from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.wrappers.fsdp2_shard import Shard, measure_shards

Named = tuple[str, Tensor | Part]


class FigureMeter:
    """Measures tensors of known names and sizes.

    Args:
        sizes: Elements of each whole tensor, by name; complex ones count twice.
        device: Where they live.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
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
        """Return the figures of tensors, of those whose names are known; waits for the device."""
        wholes: list[Measured] = []
        shards: list[Shard] = []
        names, places = [], []
        for name, tensor in tensors:
            if name not in self._row:
                continue
            part = part_of(tensor)
            number = part.tensor.is_floating_point() or part.tensor.is_complex()
            if not (number and part.tensor.numel()):
                continue
            names.append(name)
            places.append(part.place)
            shard = as_shard(part)
            if shard is None:
                wholes.append((name, part.tensor.contiguous(), 0))
            else:
                shards.append((name, *shard))
        totals = self._sketcher.new_totals()
        with torch.no_grad():
            self._sketcher.measure_many(wholes, totals)
            measure_shards(self._sketcher, shards, totals)
        rows = [self._row[name] for name in names]
        sketches = totals.sketches.cpu().numpy().reshape(-1, QUARTERS, WIDTH)
        squares = totals.squared_norms.cpu().numpy().reshape(-1, QUARTERS)
        return TensorFigures(
            tuple(names),
            tuple(places),
            np.array(squares[rows], np.float64),
            np.array(sketches[rows], np.float32),
        )

    def differences(
        self, after: Sequence[Named], before: Mapping[str, Tensor | Part]
    ) -> TensorFigures:
        """Return the figures of ``after - before``, in float32 or the tensors' wider type."""
        return self.measure((name, _difference(now, before[name])) for name, now in after)


def _difference(now: Tensor | Part, before: Tensor | Part) -> Tensor | Part:
    if isinstance(now, Part):
        return now._replace(tensor=_minus(now.tensor, part_of(before).tensor))
    return _minus(now, before)  # type: ignore[arg-type]


def _minus(now: Tensor, before: Tensor) -> Tensor:
    if now.dtype in (torch.float16, torch.bfloat16):
        return now.detach().float() - before.float()
    return now.detach() - before


def _quarters(row: int, size: int) -> tuple[Range, ...]:
    ends = [size * (part + 1) // QUARTERS for part in range(QUARTERS)]
    starts = [0, *ends[:-1]]
    found = [
        Range(QUARTERS * row + part, start, end)
        for part, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    return tuple(found) or (Range(QUARTERS * row, 0, size),)
