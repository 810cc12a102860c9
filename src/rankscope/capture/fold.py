"""Narrower sketches made from wide ones."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rankscope.capture.folding import Folding
from rankscope.capture.totals import GradientTotals


def fold(sketches: Tensor, width: int = 251, seed: int = 0) -> Tensor:
    """Make narrower sketches: entry c, with a random sign, is added to entry c mod ``width``.

    The narrow sketch is linear in the wide one, and so in the gradient. Its cosines are unbiased
    with an RMS error of about ``(1 - cos^2) * sqrt(1/width + 1/k)``.

    Args:
        sketches: float32 ``[G, k]``.
        width: Width of the result; where it is not below k, nothing is lost or gained.
        seed: Seed of the signs; equal on workers that are compared.

    Returns:
        float32 ``[G, width]``, on the same device.
    """
    num_rows, wide = sketches.shape
    padded = sketches.new_zeros(num_rows, wide + -wide % width)
    torch.mul(sketches, fold_signs(wide, seed, sketches.device), out=padded[:, :wide])
    return padded.view(num_rows, -1, width).sum(1)


def fold_plain(totals: GradientTotals, reduced: GradientTotals | None, folding: Folding) -> Tensor:
    """Return all sketches that are handed over ``[n]``, in plain torch, on their device."""
    parts = []
    if folding.sketch_width:
        total = totals.sketches.sum(0, keepdim=True)
        parts.append(_narrowed(total, folding.sketch_width))
    if folding.group_width:
        parts.append(fold(_by_group(totals.sketches, folding.counts), folding.group_width))
    if folding.audit_width:
        parts.append(_narrowed(totals.sketches, folding.audit_width))
        if reduced is not None:
            parts.append(_narrowed(reduced.sketches, folding.audit_width))
    if not parts:
        return totals.sketches.new_empty(0)
    return torch.cat([part.view(-1) for part in parts])


@functools.lru_cache(maxsize=8)
def fold_signs(count: int, seed: int, device: torch.device) -> Tensor:
    """Return the signs with which entries are added up, float32 ``[count]``."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    bits = torch.randint(2, (count,), generator=generator, device="cpu")
    return bits.mul_(2).sub_(1).to(device, torch.float32)


def _by_group(sketches: Tensor, counts: Sequence[int]) -> Tensor:
    """Add up neighbouring rows: as many as each group has."""
    if len(sketches) == len(counts):
        return sketches
    return torch.stack([rows.sum(0) for rows in torch.split(sketches, list(counts))])


def _narrowed(sketches: Tensor, width: int) -> Tensor:
    """Return narrow sketches of rows."""
    return sketches if sketches.shape[1] == width else fold(sketches, width)
