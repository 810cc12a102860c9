"""The comparable parts of an optimizer's state, and a signature of a model."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.evidence.state.plan import Slice
from rankscope.gradients.digest import PendingDigest, digest_bits, word_of

_MODULUS = 1 << 64
_of_tensor = attrgetter("shape", "dtype", "requires_grad")
_held = attrgetter("_modules", "_parameters", "_buffers")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Leaf = tuple[int, Tensor | int, int, int | None]
"""An odd weight; a tensor, or the digest of a plain value; and the tensor's range that counts."""


def optimizer_state(optimizer: object, parameter: Tensor) -> object:
    """Return the optimizer state of a parameter; None without."""
    states = getattr(optimizer, "state", None)
    return states.get(parameter) if isinstance(states, Mapping) else None


def digest_optimizer(optimizer: object, parameter: Tensor, part: Slice) -> PendingDigest:
    """Return a digest of the optimizer state of a slice of a parameter; 0 without."""
    digest = PendingDigest()
    state = optimizer_state(optimizer, parameter)
    for weight, leaf, start, stop in () if state is None else state_leaves(state, part):
        each = PendingDigest(leaf) if isinstance(leaf, int) else digest_bits(leaf, start, stop)
        digest.add(each, weight)
    return digest


def state_leaves(state: object, part: Slice, weight: int = 1) -> Iterator[Leaf]:
    """Yield the leaves of a state: its digest is the weighted sum of their digests."""
    if isinstance(state, Tensor):
        yield weight, state, *_share(state, part)
        return
    pairs: Iterable[tuple[object, object]]
    if isinstance(state, Mapping):
        pairs = state.items()
    elif isinstance(state, (list, tuple)):
        pairs = enumerate(state)
    else:
        plain = f"{type(state).__name__} {state!r}" if isinstance(state, _PLAIN) else type(state)
        yield weight, word_of(f"value {plain}"), 0, None
        return
    yield weight, _word_of_length(len(state)), 0, None
    for key, value in pairs:  # in any order: they are added up
        inner = weight * _weight_of(str(key)) % _MODULUS
        if isinstance(value, Tensor):
            yield inner, value, *_share(value, part)
        else:
            yield from state_leaves(value, part, inner)


@lru_cache(maxsize=4096)
def _word_of_length(length: int) -> int:
    return word_of(f"{length} values")


@lru_cache(maxsize=4096)
def _weight_of(key: str) -> int:
    return word_of(f"key {key}") | 1


def _share(state: Tensor, part: Slice) -> tuple[int, int | None]:
    """Return the range of a state tensor that belongs to a range of its parameter."""
    if part.start == 0 and part.stop is None:
        return 0, None
    length = (state.to_local() if isinstance(state, DTensor) else state).numel()
    if length < 2:
        return 0, None
    stop = None if part.stop is None else part.stop * length // part.length
    return part.start * length // part.length, stop


def signature(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object] | None:
    """Return a signature of a model and its optimizer, which is equal while neither has changed.

    None where there is none, as of parameters that have no shape yet.
    """
    try:
        groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
        holders = [module]
        seen = {id(module)}
        for holder in holders:
            for inner in holder._modules.values():
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    holders.append(inner)
        held = list(chain.from_iterable(map(_held, holders)))
        values = list(chain.from_iterable(map(dict.values, held)))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [
            [list(map(id, group)) for group in groups],
            list(map(list, held)),
            list(map(id, values)),
            list(map(_of_tensor, tensors)),
        ]
    except Exception:
        return None
