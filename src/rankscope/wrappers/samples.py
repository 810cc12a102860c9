"""Which of a model's inputs identify samples, and numbers for them: ids, or digests of content.

The batch is found in any structure, without reading it. A content digest is position-aware and
blind to padding: with an attention mask, the same text has the same digest whether it was padded on
the left, on the right, or not at all; without one, zeros at its end change nothing. Equal ids have
equal numbers on all workers, in every run.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.errors import UsageError
from rankscope.gradients.host import HostCopy
from rankscope.gradients.kernels.launch import Launching, launcher
from rankscope.gradients.kernels.native import digest_samples

_launching = Launching("samples are digested")

MAX_WORDS = 16_384
"""Words of one sample that enter its digest; larger samples are read at a regular stride."""

_MIX = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed number


def digest_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return one digest per sample of a batch, int64 ``[B]`` on its device; None without."""
    batch, mask = find_batch(args, kwargs)
    if batch is None:
        return None
    if isinstance(batch, Tensor):
        return _digests(batch, mask)
    if isinstance(batch[0], Tensor):
        return _digests_of_items(batch)
    return torch.from_numpy(np.array([_digest(_content(text)) for text in batch], np.int64))


def _digests_of_ids(ids: Any, mask: Any) -> NDArray[np.int64] | None:
    """Return digests of token ids in the usual host layout, in a fraction of the time."""
    if type(ids) is not Tensor or not ids.is_cpu or ids.dim() != 2 or not len(ids):
        return None
    if mask is not None and not (type(mask) is Tensor and mask.shape == ids.shape):
        return None
    if mask is not None and mask.layout is not torch.strided:
        return None
    digests_B = digest_samples(ids, mask, _weights_at()[0], MAX_WORDS, _MIX)
    return None if digests_B is None else np.frombuffer(digests_B, np.int64)


def _digests_of_items(items: Sequence[Tensor]) -> Tensor:
    return torch.cat([_digests(item.unsqueeze(0), None) for item in items])


def _digests(batch: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.shape != batch.shape:
        mask = None
    if batch.dtype is torch.float64:  # round numbers differ in the highest bits alone
        bits = batch.detach().contiguous().view(torch.int64)
        batch = bits ^ (bits >> 32)
    if batch.is_cpu:
        digests_B = digest_samples(batch, mask, _weights_at()[0], MAX_WORDS, _MIX)
        if digests_B is not None:
            return torch.frombuffer(digests_B, dtype=torch.int64)
    on_device = _digests_on_device(batch, mask) if batch.is_cuda and _launching.possible else None
    if on_device is not None:
        return on_device
    return _digests_in_torch(batch, mask)


def _digests_in_torch(batch: Tensor, mask: Tensor | None) -> Tensor:
    present = None if mask is None else mask != 0
    words = _words(batch, whole=present is not None).to(torch.int64)
    if words.is_cpu:  # numpy does the same on the host, in a fraction of the time
        seen = None if present is None else present.numpy()
        return torch.from_numpy(_mixed(words.numpy(), seen, _weights_on_host()))
    digests: Tensor = _mixed(words, present, _weights(words.device))
    return digests


def _digests_on_device(batch: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return digests by one launch; None where no kernel works, or not with this mask."""
    digests: Tensor | None = None
    try:
        if _kernel_agrees(batch.device):
            digests = launch_digests(batch, mask)
    except Exception as error:
        _launching.give_up(error)
    return digests


@cache
def _kernel_agrees(device: torch.device) -> bool:
    if torch.version.hip is not None:
        return False
    check_launched(device)
    return True


def check_launched(device: torch.device) -> None:
    """Compare the kernel with torch on a device; ArithmeticError if it errs."""
    words = torch.arange(3 * 2050, device=device).mul_(0x5DEECE66D).view(3, 2050)
    mask = words % 3 > 0
    waves = words[:, :1500].double().sin().float()
    for batch, present in ((words, None), (words.int(), mask), (waves, None), (words, mask.long())):
        launched = launch_digests(batch, present)
        if launched is None or not torch.equal(launched, _digests_in_torch(batch, present)):
            raise ArithmeticError("digests of samples on the accelerator err")


def launch_digests(batch: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return digests ``[B]`` of a batch ``[B, ...]`` by one launch; None for an unusual mask."""
    from rankscope.gradients.kernels.triton_digest import digest_rows

    if mask is not None and (batch.dim() != 2 or mask.stride(1) != 1):
        return None
    words = _words(batch, whole=mask is not None)
    counts = words if mask is None else mask.detach()
    words, counts = (t.view(torch.uint8) if t.dtype is torch.bool else t for t in (words, counts))
    digests = torch.empty(len(words), dtype=torch.int64, device=words.device)
    if not words.numel():
        return None
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        launcher(digest_rows)(
            len(words), words, counts, _weights(words.device), digests, words.shape[1],
            words.stride(0), words.stride(1), counts.stride(0), MAX_WORDS, _MIX,
            MASKED=mask is not None,
        )  # fmt: skip
    return digests


def _mixed(words: Any, present: Any, weights: Any) -> Any:
    """Return a digest ``[B]`` of each row of words ``[B, n]``, int64, in torch or in numpy.

    ``present``: which of them count, each at its place among those that do; None if all do.
    """
    if present is None:
        weighted = words * weights[: words.shape[1]]
    elif _is_padded_at_end(present):
        weighted = words * weights[: words.shape[1]] * present
    else:
        place = present.cumsum(1) - present * 1  # how many stand before it
        weighted = words * weights[place % MAX_WORDS] * present
    total = weighted.sum(1)
    total = (total ^ (total >> 29)) * _MIX
    return total ^ (total >> 32)


def _is_padded_at_end(present: Any) -> bool:
    """Return whether all padding is at the end; False where the answer would wait for a device."""
    if not isinstance(present, np.ndarray) or present.shape[1] > MAX_WORDS:
        return False
    return not (present[:, 1:] > present[:, :-1]).any()


def _words(batch: Tensor, *, whole: bool) -> Tensor:
    """Return integers ``[B, n]``: the bits of all elements of each sample, or of some."""
    rows = batch if batch.dtype is torch.int64 and batch.dim() == 2 else _as_rows(batch)
    if rows.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        rows = rows.contiguous().view(integer[rows.element_size()])
    if not whole and rows.shape[1] > MAX_WORDS:
        rows = rows[:, :: -(-rows.shape[1] // MAX_WORDS)]
    return rows


def _as_rows(batch: Tensor) -> Tensor:
    rows = batch.detach().reshape(batch.shape[0], -1)
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).reshape(batch.shape[0], -1)
    return rows


@cache
def _weights(device: torch.device) -> Tensor:
    """Return one odd random weight per position, the same on every worker."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED)
    low = torch.iinfo(torch.int64).min
    high = torch.iinfo(torch.int64).max
    words = torch.randint(low, high, (MAX_WORDS,), generator=generator, device="cpu")
    return (words | 1).to(device)


@cache
def _weights_at() -> tuple[int, Tensor]:
    """Return the weights' address on the host, and the tensor that owns them."""
    weights = _weights(torch.device("cpu"))
    return weights.data_ptr(), weights


@cache
def _weights_on_host() -> NDArray[np.int64]:
    return _weights(torch.device("cpu")).numpy()


@torch.no_grad()
def identity_of(samples: object) -> HostCopy | NDArray[np.int64] | None:
    """Return the given ids, or digests of the given tensors."""
    if isinstance(samples, Tensor) and not _is_content(samples):
        return HostCopy(samples.to(torch.int64).reshape(-1))
    if isinstance(samples, (list, tuple)) and samples and isinstance(samples[0], Tensor):
        integers = (isinstance(one, Tensor) and one.numel() == 1 for one in samples)
        if all(integers) and not any(map(_is_content, samples)):
            return HostCopy(torch.stack([one.reshape(()).to(torch.int64) for one in samples]))
        if all(isinstance(one, Tensor) and is_dense(one) and one.dim() == 1 for one in samples):
            return HostCopy(_digests_of_items(samples))
    batch, _ = find_batch((samples,), {})
    if batch is not None and isinstance(batch[0], Tensor):
        digests = digest_inputs((samples,), {})
        return None if digests is None else HostCopy(digests)
    return ids_of(samples)


def _is_content(tensor: Tensor) -> bool:
    return tensor.dim() > 1 or tensor.is_floating_point()


def digest_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | NDArray[np.int64] | None:
    """Return digests of the inputs; UsageError where they have no batch."""
    if not args:
        of_ids = _digests_of_ids(kwargs.get("input_ids"), kwargs.get("attention_mask"))
        if of_ids is not None:
            return of_ids
    digests = digest_inputs(args, kwargs)
    if digests is None and (args or kwargs):
        raise UsageError(
            "the samples of a batch cannot be told apart: no tensor with a batch dimension and no "
            "list of texts enters the model; give scope.batch(ids) one id per sample"
        )
    return digests


_DEPTH = 5
_BREADTH = 256
_MOST = 4096
_CHANNELS = (1, 3, 4)
_VAGUE = ("label", "target", "mask")

Items = Sequence[Any]


def find_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor | Items | None, Tensor | None]:
    """Return the inputs that identify samples, and their attention mask if they have one.

    That is ``input_ids``, with ``attention_mask`` beside it, in any mapping or dataclass; else the
    first tensor with a batch dimension, or list with one tensor or one mapping with an image per
    sample; else the first list of texts, which also comes before a tensor of one number per sample.
    A tensor of sequences that are packed one after the other is cut, where their lengths are known.
    So are the nodes of graphs that are one batch, on the host; elsewhere there is no batch then.
    Of named parts, those with a label, target or mask in the name come last: many samples share a
    label. The result is a tensor
    ``[B, ...]``, a list of one tensor or text per sample, or None.
    """
    named = dict(kwargs)
    for arg in args:
        if isinstance(arg, Mapping):
            named = {**arg, **named}
    for part in _parts_of([named, *args]):
        members = _members(part)
        ids = members.get("input_ids")
        mask = members.get("attention_mask")
        if isinstance(ids, Tensor) and _has_samples(ids):
            return ids, mask if isinstance(mask, Tensor) and is_dense(mask) else None
    graphs = _graphs_in([named, *args])
    if graphs is not None:
        return graphs or None, None
    values = [*args, *_by_name(named)]
    texts = (part for part in _parts_of(values) if _are_texts(part))
    for part in _parts_of(values):
        if isinstance(part, Tensor) and _has_samples(part):
            if part.dim() > 1:
                return part, None
            lengths = _lengths_in([named, *args], len(part))
            packed = torch.split(part[: sum(lengths)], list(lengths)) if lengths else ()
            return packed or next(texts, part), None
        if items := items_in(part):
            return items, None
    return next(texts, None), None


def _graphs_in(values: Sequence[Any]) -> Sequence[Tensor] | None:
    """Return the nodes of each graph, where the graph of each node is among some parts.

    None where it is not; nothing where that is not on the host.
    """
    found = [("", value) for value in values] + [m for v in values for m in _members(v).items()]
    once = {id(t): (n, t) for n, t in found if type(t) is Tensor and _has_samples(t)}
    tensors = list(once.values())
    edges = [t for name, t in tensors if name in ("", "edge_index") and _are_places(t, 2)]
    graphs = [t for name, t in tensors if name in ("", "batch") and _are_places(t, 1)]
    named = {"edge_index", "ptr"}.intersection(name for name, _ in tensors)
    if not graphs or not (edges or named):
        return None
    if not all(t.is_cpu for _, t in tensors):
        return () if named else None
    for graph_N in graphs:
        rows = [(name, t) for name, t in tensors if len(t) == len(graph_N) and t is not graph_N]
        kept = [t for n, t in rows if not any(word in str(n) for word in _VAGUE)]
        if kept and (named or edges) and _is_graph_of_nodes(graph_N, edges):
            return _cut_graphs(kept, graph_N, edges)
    return None


def _are_places(tensor: Tensor, dim: int) -> bool:
    whole = tensor.dtype in (torch.int32, torch.int64)
    return whole and tensor.dim() == dim and (dim == 1 or (len(tensor) == 2 != tensor.shape[1]))


def _is_graph_of_nodes(graph_N: Tensor, edges: Sequence[Tensor]) -> bool:
    """Return whether these are graphs from 0 on, one after the other, whose edges stay inside."""
    steps = graph_N.diff()
    if graph_N[0] != 0 or (steps < 0).any() or (steps > 1).any():
        return False
    return all(
        bool(((e >= 0) & (e < len(graph_N))).all() and (graph_N[e[0]] == graph_N[e[1]]).all())
        for e in edges
    )


def _cut_graphs(
    rows: Sequence[Tensor], graph_N: Tensor, edges: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the values of each graph's nodes, with two sums over the neighbours of each."""
    columns = [row.detach().reshape(len(row), -1).float() for row in rows]
    sizes = graph_N.bincount()
    starts = sizes.cumsum(0) - sizes
    places_N = (torch.arange(1, len(graph_N) + 1) - starts[graph_N]).double()
    for ours, theirs in edges:
        for power in (1, 2):
            sums_N = torch.zeros(len(graph_N), dtype=torch.float64)
            sums_N.index_add_(0, theirs, places_N[ours] ** power)
            columns.append(sums_N.float()[:, None])
    return torch.split(torch.cat(columns, 1), sizes.tolist())


def _lengths_in(values: Iterable[Any], most: int) -> Sequence[int]:
    """Return the lengths of sequences that fit into one of ``most`` elements; nothing if unknown.

    A list of them is a named part, or an attribute of any object.
    """
    for part in _parts_of(values):
        held = vars(part) if type(part).__dictoffset__ else {}  # past any __getattr__
        named = part if isinstance(part, Mapping) else held
        for name, value in islice(named.items(), _BREADTH):
            given = "len" in str(name) and isinstance(value, (list, tuple)) and len(value) > 0
            whole = given and all(type(length) is int and length > 0 for length in value)
            if whole and sum(value) <= most:
                return cast("Sequence[int]", value)
    return ()


def items_in(value: object) -> Sequence[Tensor]:
    """Return the tensors of a list that has one per sample; nothing of other values.

    A list may hold a mapping per sample, with an image of the same name in each.
    """
    if not isinstance(value, list) or not value:
        return ()
    if isinstance(value[0], Mapping):
        return _images_in(value)
    if not isinstance(value[0], Tensor):
        return ()
    if all(map(_is_image, value)):
        return value
    sequences = all(isinstance(v, Tensor) and is_dense(v) and v.dim() == 1 for v in value)
    return value if sequences and len({len(v) for v in value}) > 1 else ()


def _images_in(samples: Sequence[Any]) -> Sequence[Tensor]:
    """Return the first image of each mapping, of one name."""
    if all(isinstance(sample, Mapping) for sample in samples):
        for name in islice(samples[0], _BREADTH):
            images = [sample.get(name) for sample in samples]
            if all(map(_is_image, images)):
                return images
    return ()


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has its elements at hand: no sparse, nested or sharded one."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _has_samples(tensor: Tensor) -> bool:
    return is_dense(tensor) and tensor.dim() > 0 and tensor.shape[0] > 0


def _is_image(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and is_dense(value)
        and value.dim() == 3
        and value.shape[0] in _CHANNELS
        and (value.is_floating_point() or value.dtype is torch.uint8)
    )


def _are_texts(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(text, (str, bytes)) for text in value)


def _parts_of(values: Iterable[Any]) -> Iterable[Any]:
    """Yield values and their contents, in order, up to a depth and a number."""
    return islice(_nested(values, _DEPTH), _MOST)


def _nested(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in islice(values, _BREADTH):
        yield value
        if depth:
            held = value if isinstance(value, (list, tuple)) else _by_name(_members(value))
            yield from _nested(held, depth - 1)


def _by_name(members: Mapping[Any, Any]) -> list[Any]:
    """Return the values of named parts; labels, targets and masks last."""

    def is_vague(item: tuple[Any, Any]) -> bool:
        name = item[0]
        return isinstance(name, str) and any(word in name.lower() for word in _VAGUE)

    return [value for _, value in sorted(islice(members.items(), _BREADTH), key=is_vague)]


def _members(value: object) -> Mapping[Any, Any]:
    """Return the named parts of a mapping or dataclass."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    if any(kind.__module__ == "torch_geometric.data.data" for kind in type(value).__mro__):
        return cast("Any", value).to_dict()  # type: ignore[no-any-return]
    return {}


_LOWEST = -(1 << 63)
_HIGHEST = (1 << 63) - 1


def ids_of(samples: object) -> NDArray[np.int64]:
    """Return one number per id; UsageError where one has no content that all workers see alike.

    Integers stand for themselves; text, bytes, UUIDs, dates, paths, and tuples of these are
    digested.
    """
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "iu":
        return samples.astype(np.int64).reshape(-1)
    if isinstance(samples, np.ndarray):
        samples = samples.reshape(-1).tolist()
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping)):
        return np.array([_number(sample) for sample in samples], np.int64)
    raise UsageError(
        f"batch() expected ids (numbers, text, UUIDs, tuples) or the tensors of a batch, "
        f"got {type(samples).__name__}; pass one id per sample"
    )


def _number(sample: Any) -> int:
    if isinstance(sample, (np.generic, np.ndarray)) and sample.ndim == 0:
        sample = sample.item()
    if isinstance(sample, Tensor) and sample.numel() == 1:
        sample = sample.item()
    if isinstance(sample, float) and sample.is_integer():
        sample = int(sample)
    if isinstance(sample, int) and _LOWEST < sample <= _HIGHEST:
        return int(sample)
    return _digest(_content(sample))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _content(sample: Any) -> bytes:
    """Return the content of an id as bytes."""
    if isinstance(sample, str):
        return sample.encode("utf-8", "surrogatepass")
    if isinstance(sample, bytes):
        return b"\0bytes " + sample
    if isinstance(sample, np.ndarray):
        sample = sample.tolist()
    if isinstance(sample, (tuple, list)):
        numbers = np.array([_number(part) for part in sample], np.int64)
        return b"\0tuple " + numbers.tobytes()
    kind: type[object] = type(sample)
    shows_address = kind.__repr__ is object.__repr__ or callable(sample)
    problem = ""
    if sample is None or isinstance(sample, (Mapping, Set, Tensor)) or shows_address:
        problem = f"got {type(sample).__name__}"
    elif isinstance(sample, float) and math.isnan(sample):
        problem = "NaN is no id"
    if problem:
        raise UsageError(
            f"batch() expected numbers, text, UUIDs or tuples of these as ids, {problem}; "
            "pass one id per sample"
        )
    return f"\0{type(sample).__qualname__} {sample!r}".encode("utf-8", "surrogatepass")
