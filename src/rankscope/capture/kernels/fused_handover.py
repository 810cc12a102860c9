"""Runs the kernel that gathers what was measured on a CUDA device."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rankscope.capture.fold import fold_signs
from rankscope.capture.folding import Folding
from rankscope.capture.kernels import triton_handover as kernels
from rankscope.capture.totals import GradientTotals
from rankscope.core.measured import NUMBERS


def hand_over(
    totals: GradientTotals,
    reduced: GradientTotals | None,
    folding: Folding,
    given: Mapping[str, Tensor],
    take: Callable[[int], Tensor],
) -> Tensor:
    """Gather numbers and sketches with one launch, and one for each of what is given.

    Args:
        totals: Of the local gradient.
        reduced: Of the reduced one.
        folding: Which sketches are wanted.
        given: Float64 vectors of the numbers that are not in the totals, by their names in
            ``NUMBERS``.
        take: Returns so many words of 64 bits on the device.

    Returns:
        float64 ``[n]``: the numbers in the order of ``NUMBERS``, and behind them the float32
        sketches, padded.
    """
    num_rows = folding.num_rows
    lengths = {
        "squares": num_rows,
        "reduced_squares": num_rows * folding.reduced,
        "largest": 1,
        "nonfinite": 1,
        **{name: len(vector) for name, vector in given.items()},
    }
    firsts, first = {}, 0
    for name in NUMBERS:
        firsts[name] = first
        first += lengths.get(name, 0)
    num_floats = sum(folding.lengths.values())
    memory = take(first + -(-num_floats // 2)).view(torch.float64)
    for name, vector in given.items():
        memory[firsts[name] : firsts[name] + len(vector)] = vector
    other = totals if reduced is None else reduced
    device = memory.device
    table = _table(folding, device)
    with torch.cuda.device_of(memory):  # type: ignore[no-untyped-call]
        kernels.gather[(len(table) + 1,)](
            table, totals.sketches, other.sketches, fold_signs(folding.wide, 0, device),
            memory[first:].view(torch.float32), totals.squared_norms, other.squared_norms,
            totals.largest, totals.nonfinite, memory, len(table), num_rows, firsts["largest"],
            WIDE=folding.wide, REDUCED=reduced is not None,
        )  # fmt: skip
    return memory


@functools.lru_cache(maxsize=16)
def _table(folding: Folding, device: torch.device) -> Tensor:
    """Return what each program makes."""
    programs = [
        (*sketch, column)
        for sketch in folding.wanted
        for column in range(0, sketch[3], kernels.COLUMNS)
    ]
    table = torch.tensor(programs, dtype=torch.int64, device="cpu").reshape(-1, kernels.FIELDS)
    return table.to(device)
