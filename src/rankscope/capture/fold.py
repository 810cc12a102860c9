"""A narrower sketch made from a wide one."""

import torch
from torch import Tensor


def fold(sketches: Tensor, width: int = 251, seed: int = 0) -> Tensor:
    """Return ``[G, width]`` from ``[G, k]``: bucket c is added to bucket c mod width, with a sign."""
    wide = sketches.shape[1]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (wide,), generator=generator).mul_(2).sub_(1).to(sketches)
    padded = torch.zeros(len(sketches), -(-wide // width) * width, device=sketches.device)
    padded[:, :wide] = sketches * signs
    return padded.view(len(sketches), -1, width).sum(1)
