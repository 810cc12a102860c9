"""Changes of a training before its first step that a comparison asks for."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rankscope.evidence.parity.place import part_of
from rankscope.evidence.parity.saved import load_tensors, save_tensors
from rankscope.gradients.names import canonical_name

_SHARE = 0.25
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@dataclass(frozen=True, slots=True)
class Start:
    """Changes before the first forward pass.

    Attributes:
        eps: Relative size of the moves of a quarter of the parameters' elements; 0 for none.
        no_dropout: Whether dropout is switched off.
        save_to: Folder to which each rank writes its parameters and buffers; None for none.
        load_from: Folder of such files, from which they are read; None for none.
    """

    eps: float = 0.0
    no_dropout: bool = False
    save_to: Path | None = None
    load_from: Path | None = None

    def perturb(self, module: nn.Module) -> None:
        """Move a quarter of the elements of each parameter by ``eps`` of their size, up or down.

        Copies of a parameter are moved alike. No random generator of the training is touched.
        """
        if not self.eps:
            return
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            part = part_of(parameter)
            seed = f"{canonical_name(name)} {part.place}".encode()
            draw = torch.Generator("cpu").manual_seed(
                int.from_bytes(hashlib.blake2b(seed, digest_size=7).digest(), "little")
            )
            local = part.tensor
            moves = torch.rand(local.shape, generator=draw)
            signs = (moves < _SHARE / 2).float() - (moves > 1 - _SHARE / 2).float()
            moved = local.double() * (1 + self.eps * signs.to(local.device).double())
            local.copy_(moved.to(local.dtype))


def set_up(start: Start, module: nn.Module, rank: int) -> None:
    """Make the changes that the record of the start is to show.

    Args:
        start: The changes.
        module: The model.
        rank: This rank.

    Raises:
        RunError: What is to be loaded does not fit, or what is to be saved cannot be written.
    """
    if start.no_dropout:
        switch_off_dropout(module)
    if start.load_from is not None:
        load_tensors(start.load_from, tensors_of(module))
    if start.save_to is not None:
        save_tensors(start.save_to, rank, tensors_of(module))


def switch_off_dropout(module: nn.Module) -> None:
    """Set the probability of every dropout to 0, of layers and of attention."""
    for each in module.modules():
        if isinstance(each, _DROPOUTS):
            each.p = 0.0
        for name, value in vars(each).items():
            if "drop" in name and isinstance(value, float):
                setattr(each, name, 0.0)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and floating-point buffers by their canonical names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {canonical_name(n): t.detach() for n, t in named if t.is_floating_point()}
