"""Changes of a training before its first step that a comparison asks for.

Parameters and buffers of one layout may be read into another one. Each rank writes its parts into
one file in the format of safetensors, with their places beside them; a rank of another layout reads
what overlaps with its own parts.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.errors import RunError
from rankscope.evidence.parity.figures import Part, part_of
from rankscope.evidence.parity.held import (
    HeldElements,
    Naming,
    is_dealt_out,
    is_partitioned,
    stored,
)
from rankscope.files import write_error
from rankscope.gradients.names import canonical_name

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8


_AS_NAMED = Naming((), {})


def save_tensors(
    folder: Path, rank: int, tensors: Mapping[str, Tensor], naming: Naming = _AS_NAMED
) -> None:
    """Write this rank's parts of floating-point tensors; of copies on all ranks, one rank's alone.

    Raises RunError: they cannot be written.
    """
    parts = {
        name: naming.placed(name, part_of(stored(tensor)))
        for name, tensor in tensors.items()
        if tensor.dtype in _NAMES and _is_first_copy(tensor, rank)
    }
    # The widest first: each then begins at a multiple of the size of its elements.
    named = sorted(parts.items(), key=lambda one: -one[1].tensor.element_size())
    header: dict[str, Any] = {}
    places = {}
    at = 0
    for name, part in named:
        key = f"{name}@{rank}"
        length = part.tensor.numel() * part.tensor.element_size()
        header[key] = {
            "dtype": _NAMES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [at, at + length],
        }
        places[key] = [naming.of(name), list(part.first), list(part.shape)]
        at += length
    text = json.dumps({_METADATA: {"places": json.dumps(places)}, **header}).encode()
    text += b" " * (-len(text) % _LENGTH)
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(_LENGTH, "little") + text)
            for _, part in named:
                local = part.tensor.contiguous().cpu().reshape(-1)
                file.write(local.view(torch.uint8).numpy().data)
    except OSError as error:
        raise write_error(path, error) from error


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], naming: Naming = _AS_NAMED) -> None:
    """Copy what is saved into this rank's parts; RunError where a tensor is not all there."""
    saved: dict[str, dict[str, Part]] = {}  # by name and place: copies of a part are one
    for file in sorted(folder.glob("rank-*.safetensors")):
        for name, part in _read(file):
            saved.setdefault(name, {})[part.place] = part
    for name, tensor in tensors.items():
        own = naming.placed(name, part_of(stored(tensor)))
        copied = sum(_copy(part, own) for part in saved.get(naming.of(name), {}).values())
        if copied != own.tensor.numel():
            raise RunError(f"{folder} holds {copied} of {own.tensor.numel()} elements of {name}")


def _is_first_copy(tensor: Tensor, rank: int) -> bool:
    if is_partitioned(tensor) or is_dealt_out(tensor):
        return True
    if not isinstance(tensor, DTensor):
        return rank == 0
    axes = enumerate(tensor.placements)
    mesh = tensor.device_mesh
    return all(not p.is_replicate() or mesh.get_local_rank(axis) == 0 for axis, p in axes)


def _read(file: Path) -> Iterator[tuple[str, Part]]:
    """Yield the saved parts; what is read of the file is what is copied from them."""
    try:
        with file.open("rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        begin = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
        header = json.loads(content[_LENGTH:begin])
        places = json.loads(header.pop(_METADATA)["places"])
        for key, (name, first, whole) in places.items():
            one = header[key]
            count = math.prod(one["shape"])
            if not count:
                continue
            at = begin + int(one["data_offsets"][0])
            values = torch.frombuffer(content, dtype=_TYPES[one["dtype"]], count=count, offset=at)
            yield str(name), Part(values.view(one["shape"]), tuple(whole), tuple(first))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{file} holds no parameters that can be read ({error})") from error


def _copy(source: Part, target: Part) -> int:
    """Copy where two parts of a tensor overlap; return the number of elements."""
    if len(source.shape) != len(target.shape):
        return _copy_flat(source, target)
    theirs = source.tensor
    mine = target.tensor
    for dim, (begin, start) in enumerate(zip(source.first, target.first, strict=True)):
        low = max(begin, start)
        high = min(begin + theirs.shape[dim], start + mine.shape[dim])
        if high <= low:
            return 0
        theirs = theirs.narrow(dim, low - begin, high - low)
        mine = mine.narrow(dim, low - start, high - low)
    mine.copy_(theirs)
    return mine.numel()


def _copy_flat(source: Part, target: Part) -> int:
    """Copy where one of the two is a part of the flat tensor."""
    whole, flat = (source, target) if len(target.shape) == 1 else (target, source)
    at = torch.zeros((), dtype=torch.int64)
    for first, length, size in zip(whole.first, whole.tensor.shape, whole.shape, strict=True):
        at = at[..., None] * size + torch.arange(first, first + length)
    at -= flat.first[0]
    inside = ((at >= 0) & (at < flat.tensor.numel())).to(whole.tensor.device)
    at = at.to(flat.tensor.device)[inside.to(flat.tensor.device)]
    if whole is source:
        flat.tensor[at] = source.tensor[inside].to(flat.tensor)
    else:
        whole.tensor[inside] = flat.tensor[at].to(whole.tensor)
    return len(at)


_SHARE = 0.25
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@dataclass(frozen=True, slots=True)
class Start:
    """Changes before the first forward pass."""

    # relative size of the moves of a quarter of the parameters' elements; 0 for none
    eps: float = 0.0
    no_dropout: bool = False  # whether dropout is switched off
    # folder to which each rank writes its parameters and buffers; None for none
    save_to: Path | None = None
    load_from: Path | None = None  # folder of such files, from which they are read; None for none

    def perturb(self, module: nn.Module, held: HeldElements) -> None:
        """Move a quarter of the elements of each parameter by ``eps`` of their size, up or down.

        Copies of a parameter are moved alike. No random generator of the training is touched.
        """
        if not self.eps:
            return
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            part = part_of(parameter if parameter.numel() else stored(parameter))
            seed = f"{canonical_name(name)} {part.place}".encode()
            draw = torch.Generator("cpu").manual_seed(
                int.from_bytes(hashlib.blake2b(seed, digest_size=7).digest(), "little")
            )
            local = part.tensor
            moves = torch.rand(local.shape, generator=draw)
            signs = (moves < _SHARE / 2).float() - (moves > 1 - _SHARE / 2).float()
            moved = local.double() * (1 + self.eps * signs.to(local.device).double())
            local.copy_(moved.to(local.dtype))
        renew_masters(module, held)


def set_up(start: Start, module: nn.Module, rank: int, naming: Naming, held: HeldElements) -> None:
    """Make the changes that the record of the start is to show; RunError: a file does not fit."""
    if start.no_dropout:
        switch_off_dropout(module)
    if start.load_from is not None:
        load_tensors(start.load_from, tensors_of(module), naming)
        renew_masters(module, held)
    if start.save_to is not None:
        save_tensors(start.save_to, rank, tensors_of(module), naming)


def switch_off_dropout(module: nn.Module) -> None:
    """Set the probability of every dropout to 0, of layers and of attention."""
    for each in module.modules():
        if isinstance(each, _DROPOUTS):
            each.p = 0.0
        for name, value in vars(each).items():
            if "drop" in name and isinstance(value, float):
                setattr(each, name, 0.0)


def renew_masters(module: nn.Module, held: HeldElements) -> None:
    """Copy the parameters into the tensors that an optimizer trains in their place."""
    for parameter in module.parameters():
        for master in held.masters_of(parameter):
            _copy(part_of(stored(parameter)), master)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and floating-point buffers by their canonical names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {canonical_name(n): t for n, t in named if t.is_floating_point()}
