"""The inputs of a forward pass, copied for a replay, and restored for another one.

Tensors start their way to the host at once and are read on arrival. A batch may also hold numbers,
text, None, and lists, tuples and mappings of all these. Anything else would need pickle, which is
never used. What stays in this process may also hold objects of these, such as a detector's boxes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankscope.bus.bundles import PlainBatch
from rankscope.errors import RankscopeError
from rankscope.gradients.host import HostCopy
from rankscope.wrappers.samples import digest_inputs

MAX_BATCH_BYTES = 64 * 2**20
"""Larger batches are declined: every worker would have to receive them."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_KNOWS = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


class CanaryDeclined(RankscopeError):  # noqa: N818 - an answer, not a failure
    """A canary cannot run, for the given reason; with ``out_of_memory``, no later one can."""

    def __init__(self, reason: str, *, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True, slots=True)
class CapturedBatch:
    """A batch on its way to the host."""

    structure: Any  # plain JSON, and the classes of objects
    arrays: Sequence[HostCopy | NDArray[Any]]  # those that numpy lacks as integers of the same bits
    samples: HostCopy | None = None  # digest of each, where a batch was recognised

    @property
    def ready(self) -> bool:
        """Whether :meth:`plain` would not wait."""
        copies = [a for a in (*self.arrays, self.samples) if isinstance(a, HostCopy)]
        return all(copy.ready for copy in copies)

    def plain(self) -> PlainBatch:
        """Wait for the device and return the batch."""
        arrays = tuple(a.numpy() if isinstance(a, HostCopy) else a for a in self.arrays)
        if self.samples is None:
            return PlainBatch(self.structure, arrays)
        return PlainBatch(self.structure, arrays, self.samples.numpy().astype(np.int64))


@torch.no_grad()
def capture_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    moves_inputs: bool = False,  # to the model's device, as DDP does with ``device_ids``
    most_bytes: int = MAX_BATCH_BYTES,  # larger batches are declined
    objects: bool = False,  # of batches that stay in this process
) -> CapturedBatch:
    """Return a copy of the inputs of a forward pass."""
    keeper = _Keeper(moves_inputs, most_bytes, objects)
    try:
        structure = keeper.keep((tuple(args), dict(kwargs)))
    except CanaryDeclined:
        raise
    except RecursionError:
        raise CanaryDeclined("the batch contains itself and cannot be kept for a replay") from None
    except Exception as error:
        raise CanaryDeclined(f"the batch cannot be kept for a replay ({error!r})") from error
    return CapturedBatch(structure, keeper.arrays, _digests(args, kwargs))


def restore_batch(
    batch: PlainBatch, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward pass, with new tensors: on the host where they were."""
    tensors: dict[int, Tensor] = {}
    try:
        args, kwargs = _restore(batch.structure, batch.arrays, device, tensors)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise TypeError("its arguments are no tuple and no dict")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CanaryDeclined(f"a kept batch cannot be brought back ({error})") from error
    return args, kwargs


def samples_of(batch: PlainBatch) -> list[PlainBatch]:
    """Return the samples of a batch as batches of one.

    Tensors whose first axis has as many entries as there are samples are cut; all others are given
    to every sample as they are. Returns nothing where no samples were recognised, or no tensor has
    as many entries.
    """
    count = len(batch.samples)
    if not any(a.ndim and len(a) == count for a in batch.arrays):
        return []
    return [
        PlainBatch(
            batch.structure,
            tuple(a[i : i + 1] if a.ndim and len(a) == count else a for a in batch.arrays),
            batch.samples[i : i + 1],
        )
        for i in range(count)
    ]


class _Keeper:
    """Turns nested arguments into JSON, and collects their tensors."""

    def __init__(self, moves_inputs: bool, most_bytes: int, objects: bool) -> None:
        self._objects = objects
        self._most_bytes = most_bytes
        self.arrays: list[HostCopy | NDArray[Any]] = []
        self._moves_inputs = moves_inputs
        # A tensor given twice stays one tensor; the reference keeps its id from being reused.
        self._places: dict[int, tuple[Any, Any]] = {}
        self._num_bytes = 0

    def keep(self, value: Any) -> Any:
        """Return the JSON of a value; raise CanaryDeclined where there is none."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.ndarray | np.generic):  # before text and floats: some are these
            return self._keep_once(value, self._keep_array)
        if isinstance(value, str):
            return str.__str__(value)  # without the ``__str__`` of an enumeration
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return {"float": float.hex(value)}
        if isinstance(value, Tensor):
            _check_tensor(value)
            return self._keep_once(value, self._keep_tensor)
        return self._keep_parts(value)

    def _keep_parts(self, value: Any) -> Any:
        """Return the JSON of a value that holds others."""
        if isinstance(value, Mapping):
            return {"dict": [[self.keep(key), self.keep(item)] for key, item in value.items()]}
        if type(value) is list:
            return {"list": [self.keep(item) for item in value]}
        if type(value) in (tuple, torch.Size):
            return {"tuple": [self.keep(item) for item in value]}
        if self._objects and _is_record(value):
            return {"object": type(value), "members": self.keep(vars(value))}
        raise _unknown(f"value of type {type(value).__name__}")

    def _keep_once(self, value: Any, keep: Any) -> Any:
        if id(value) not in self._places:
            self._num_bytes += value.nbytes
            if self._num_bytes > self._most_bytes:
                raise CanaryDeclined(
                    f"the batch is larger than {self._most_bytes // 2**20} MiB and is not kept "
                    "for a replay"
                )
            self._places[id(value)] = value, keep(value)
        return self._places[id(value)][1]

    def _keep_tensor(self, tensor: Tensor) -> Any:
        bits = tensor.detach()
        if bits.dtype not in _NUMPY_KNOWS:
            bits = bits.contiguous().view(_INTEGERS[bits.element_size()])
        self.arrays.append(HostCopy(bits.resolve_conj().resolve_neg()))
        return {
            "tensor": len(self.arrays) - 1,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "host": tensor.device.type == "cpu" and not self._moves_inputs,
        }

    def _keep_array(self, array: Any) -> Any:
        copy = np.array(array)
        if copy.dtype.kind not in "biufcSU":
            raise _unknown(f"numpy array of {copy.dtype}")
        self.arrays.append(copy)
        return {"array": len(self.arrays) - 1, "scalar": isinstance(array, np.generic)}


def _is_record(value: Any) -> bool:
    """Return whether an object is what its attributes are, and can be made of them alone."""
    kind: Any = type(value)
    defined = {name: own for each in kind.__mro__[-2::-1] for name, own in vars(each).items()}
    return (
        hasattr(value, "__dict__")
        and kind.__new__ is object.__new__
        and not callable(value)
        and not defined.get("__slots__")
        and defined.keys().isdisjoint(("__del__", "__getstate__", "__reduce__", "__reduce_ex__"))
    )


def _check_tensor(tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise _unknown(f"tensor of type {type(tensor).__name__}, {tensor.layout}")


def _digests(args: Sequence[Any], kwargs: Mapping[str, Any]) -> HostCopy | None:
    try:
        digests = digest_inputs(args, kwargs)
    except (RuntimeError, TypeError):  # a batch without digests of its samples
        return None
    return None if digests is None else HostCopy(digests)


def _unknown(what: str) -> CanaryDeclined:
    return CanaryDeclined(
        f"the batch holds a {what}, which cannot be kept for a replay; tensors, numbers, text, and "
        "lists, tuples and dicts of these can"
    )


def _restore(
    value: Any, arrays: Sequence[NDArray[Any]], device: torch.device, made: dict[int, Tensor]
) -> Any:
    if not isinstance(value, dict):
        return value
    [tag] = value.keys() & {"float", "tensor", "array", "dict", "list", "tuple", "object"}
    content = value[tag]
    if tag in ("tensor", "array") and (type(content) is not int or content < 0):
        raise IndexError(f"it has no tensor {content!r:.40}")
    if tag == "float":
        return float.fromhex(content)
    if tag == "tensor":
        if content not in made:
            made[content] = _tensor(arrays[content], value, device)
        return made[content]
    if tag == "array":
        return arrays[content][()] if value["scalar"] else arrays[content].copy()
    if tag == "object":
        if not isinstance(content, type):  # no JSON has one
            raise TypeError("it holds an object")
        made_again: Any = object.__new__(content)
        vars(made_again).update(_restore(value["members"], arrays, device, made))
        return made_again
    if tag == "dict":
        pairs = [[_restore(part, arrays, device, made) for part in pair] for pair in content]
        return {key: item for key, item in pairs}  # noqa: C416 - the pairs are lists
    items = [_restore(item, arrays, device, made) for item in content]
    return items if tag == "list" else tuple(items)


def _tensor(array: NDArray[Any], place: Mapping[str, Any], device: torch.device) -> Tensor:
    dtype = getattr(torch, place["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{place['dtype']} is no type of tensors")
    tensor = torch.from_numpy(array.copy())
    if tensor.dtype is not dtype:
        if dtype in _NUMPY_KNOWS or tensor.dtype is not _INTEGERS.get(dtype.itemsize):
            raise TypeError(f"{tensor.dtype} is stored where {dtype} is expected")
        tensor = tensor.view(dtype)
    return tensor if place["host"] else tensor.to(device)
