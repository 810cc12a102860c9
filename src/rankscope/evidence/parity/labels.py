"""The label tokens of a micro-batch, from the graph of its loss or from the model's inputs."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.wrappers.labels import IGNORED_LABEL, labels_in, own

if TYPE_CHECKING:
    from rankscope.stats.arrays import Ints

_MOST_NODES = 96
_MIX = np.uint64(0x9E3779B97F4A7C15)
_BITS = (1 << 62) - 1


class Labels(NamedTuple):
    """Label tokens, whatever their order."""

    num_tokens: int = 0
    digest: int = 0  # a sum over them, modulo 2^62: equal multisets have equal sums

    def plus(self, other: "Labels") -> "Labels":
        """Return both together."""
        return Labels(self.num_tokens + other.num_tokens, (self.digest + other.digest) & _BITS)


def labels_before(roots: Iterable[Tensor]) -> Labels | None:
    """Return the targets of the cross entropies behind some losses; None where there are none."""
    waiting: deque[Any] = deque(root.grad_fn for root in roots)
    seen: set[Any] = set()
    found = None
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith("NllLoss"):
            labels = _targets_of(node)
            if labels is not None:
                found = labels if found is None else found.plus(labels)
            continue
        waiting.extend(before for before, _ in node.next_functions)
    return found


def labels_among(inputs: Mapping[str, Any], *, shifted: bool) -> Labels | None:
    """Return the label tokens in a model's inputs; None without ``labels`` or ``shift_labels``."""
    labels, first = labels_in(inputs, shifted=shifted)
    if labels is None or labels.is_floating_point():
        return None
    return _counted(own(labels[..., first:]), IGNORED_LABEL)


def _targets_of(node: Any) -> Labels | None:
    packed = getattr(node, "_raw_saved_target", None)
    if getattr(packed, "unpack_hook", None) is not None:
        return None  # only the training may unpack it
    try:
        target, ignored = node._saved_target, node._saved_ignore_index
    except (AttributeError, RuntimeError):  # freed, or changed in place since
        return None
    if not isinstance(target, Tensor) or isinstance(target, DTensor) or target.is_floating_point():
        return None
    signed = ignored - (1 << 64) if ignored >= 1 << 63 else ignored  # as autograd shows it
    return _counted(target.detach(), int(signed))


def _counted(target: Tensor, ignored: int) -> Labels:
    values: Ints = target.reshape(-1).cpu().numpy().astype(np.int64)
    values = values[values != ignored]
    mixed = (values.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    mixed ^= mixed >> np.uint64(32)
    return Labels(len(values), int(mixed.sum(dtype=np.uint64)) & _BITS)
