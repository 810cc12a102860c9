"""Changes of a training before its first step that a comparison asks for.

Parameters and buffers of one layout may be read into another one. Each rank writes its parts into
one file in the format of safetensors, with their places beside them; a rank of another layout reads
what overlaps with its own parts.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.errors import RunError
from rankscope.evidence.parity.figures import is_partitioned, part_of, stored
from rankscope.evidence.parity.naming import Naming
from rankscope.files import replace
from rankscope.gradients.names import canonical_name

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8


class _Box(NamedTuple):
    """A part of a whole tensor: where it begins in each dimension, and its content."""

    first: tuple[int, ...]
    values: Tensor


_AS_NAMED = Naming((), {})


def save_tensors(
    folder: Path, rank: int, tensors: Mapping[str, Tensor], naming: Naming = _AS_NAMED
) -> None:
    """Write this rank's parts of floating-point tensors; of copies, one rank's alone."""
    header: dict[str, Any] = {}
    places = {}
    parts = []
    at = 0
    for name, tensor in tensors.items():
        part = naming.placed(name, part_of(tensor))
        if not _is_first_copy(tensor, rank) or part.tensor.dtype not in _NAMES:
            continue
        content = part.tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = f"{name}@{rank}"
        header[key] = {
            "dtype": _NAMES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [at, at + len(content)],
        }
        places[key] = [naming.of(name), list(part.first)]
        parts.append(content)
        at += len(content)
    text = json.dumps({_METADATA: {"places": json.dumps(places)}, **header}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    head = len(text).to_bytes(_LENGTH, "little") + text
    replace(folder / f"rank-{rank:05d}.safetensors", b"".join([head, *parts]))


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], naming: Naming = _AS_NAMED) -> None:
    """Copy what is saved into this rank's parts; RunError where a tensor is not all there."""
    boxes: dict[str, list[_Box]] = {}
    for file in sorted(folder.glob("rank-*.safetensors")):
        for name, box in _read(file):
            boxes.setdefault(name, []).append(box)
    for name, tensor in tensors.items():
        part = naming.placed(name, part_of(tensor))
        saved = boxes.get(naming.of(name), ())
        copied = sum(_copy(box, part.first, part.tensor) for box in saved)
        if copied != part.tensor.numel():
            raise RunError(f"{folder} holds {copied} of {part.tensor.numel()} elements of {name}")


def _is_first_copy(tensor: Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    axes = enumerate(tensor.placements)
    mesh = tensor.device_mesh
    return all(not p.is_replicate() or mesh.get_local_rank(axis) == 0 for axis, p in axes)


def _read(file: Path) -> Iterator[tuple[str, _Box]]:
    content = bytearray(file.read_bytes())
    try:
        begin = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
        header = json.loads(bytes(content[_LENGTH:begin]))
        places = json.loads(header.pop(_METADATA)["places"])
        for key, (name, first) in places.items():
            one = header[key]
            count = math.prod(one["shape"])
            dtype = _TYPES[one["dtype"]]
            at = begin + int(one["data_offsets"][0])
            if count:
                values = torch.frombuffer(content, dtype=torch.uint8, count=count * dtype.itemsize,
                                          offset=at).clone().view(dtype)  # fmt: skip
            else:
                values = torch.empty(0, dtype=dtype)
            yield str(name), _Box(tuple(map(int, first)), values.view(one["shape"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{file} holds no parameters that can be read ({error})") from error


def _copy(box: _Box, first: Sequence[int], own: Tensor) -> int:
    """Copy where a saved part overlaps with a rank's own; return the number of elements."""
    if box.values.dim() != own.dim():
        return 0
    for dim, (theirs, mine) in enumerate(zip(box.first, first, strict=True)):
        low = max(theirs, mine)
        high = min(theirs + box.values.shape[dim], mine + own.shape[dim])
        if high <= low:
            return 0
    source, target = box.values, own
    for dim, (theirs, mine) in enumerate(zip(box.first, first, strict=True)):
        low = max(theirs, mine)
        high = min(theirs + box.values.shape[dim], mine + own.shape[dim])
        source = source.narrow(dim, low - theirs, high - low)
        target = target.narrow(dim, low - mine, high - low)
    target.copy_(source)
    return target.numel()


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

    def perturb(self, module: nn.Module) -> None:
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


def set_up(start: Start, module: nn.Module, rank: int, naming: Naming) -> None:
    """Make the changes that the record of the start is to show.

    Raises RunError: what is to be loaded does not fit, or what is to be saved cannot be written.
    """
    if start.no_dropout:
        switch_off_dropout(module)
    if start.load_from is not None:
        load_tensors(start.load_from, tensors_of(module), naming)
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


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and floating-point buffers by their canonical names.

    Raises RunError: ZeRO 3 shards them.
    """
    if any(map(is_partitioned, module.parameters())):
        raise RunError("parameters that ZeRO 3 shards can neither be saved nor replaced")
    named = [*module.named_parameters(), *module.named_buffers()]
    return {canonical_name(n): t.detach() for n, t in named if t.is_floating_point()}
