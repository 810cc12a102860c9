"""The divisor of a training's loss, which is a sum over tokens: read once, from autograd's graph.

A trainer returns a number. It may be a mean over the worker's own label tokens, or their sum
divided by the number of all workers' tokens and multiplied by W. The number does not show which,
but its graph does: autograd saves the last divisions and multiplications, the number of label
tokens in a cross entropy, and the mask of a masked sum. What a hook of the training's has packed is
not read: it may be computed anew, or fetched from elsewhere, when read.
"""

import math
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOST_NODES = 48
_MOST_GATHERED = 4096
_JOINING = ("CatBackward", "StackBackward")
_SAVED = ("_saved_other", "_saved_self")
_PACKED = {
    "_saved_other": "_raw_saved_other",
    "_saved_self": "_raw_saved_self",
    "_saved_weight": "_raw_saved_weight",
    "_saved_total_weight": "_raw_saved_total_weight",
    "_saved_target": "_raw_saved_target",
}
"""Name of the packed tensor in autograd, by the name of the saved tensor."""
_SELECTING = ("IndexBackward", "MaskedSelectBackward")
PASSING = ("ToCopyBackward", "CloneBackward", "ViewBackward", "AliasBackward", "SqueezeBackward")
"""Operators that do not change a number."""

# torch's numbers of its reductions
_NONE = 0
_MEAN = 1
_SUM = 2


@dataclass(frozen=True, slots=True)
class LossForm:
    """The ratio of a loss to the mean over a worker's own label tokens."""

    divided_by_all: bool
    """Whether a sum was divided by the number of label tokens in all micro-batches of the step (of
    all workers, or of this one: as the trainer has counted)."""
    times_workers: bool  # the result was multiplied by the number of workers

    def factor(self, own: Tensor, num_items: Tensor | float, num_workers: int) -> Tensor | float:
        """Return the loss over the mean per own label token; arguments as of :func:`read_form`."""
        workers = num_workers if self.times_workers else 1
        return own * workers / num_items if self.divided_by_all else workers


def read_form(
    loss: Tensor,  # the scalar on which the training is about to call ``backward``
    own: Tensor | float,  # the micro-batch's own label tokens
    num_items: Tensor | float,  # tokens that the trainer counted; the loss may be divided by them
    num_workers: int,
) -> LossForm | None:
    """Return the form of a loss; None if unknown. Waits for the device."""
    count = float(num_items)
    own = float(own)
    divided = mean = workers = False
    for node in _nodes_before(loss):
        kind = type(node).__name__
        mean |= is_mean_node(node)
        numbers = [float(n) for n in (_number(node, name) for name in _SAVED) if n is not None]
        if kind.startswith("DivBackward"):
            divided |= any(_is(number, count) for number in numbers)
            mean |= own != count and any(_is(number, own) for number in numbers)
        elif kind.startswith("MulBackward"):
            divided |= any(_is(number, 1 / count) for number in numbers if count)
            workers |= num_workers > 1 and any(_is(number, num_workers) for number in numbers)
    return LossForm(divided, workers) if divided or mean else None


def is_mean(loss: Tensor) -> bool:
    """Return whether a loss is a mean of its own terms, as far as autograd shows it."""
    return is_mean_node(origin_of(loss))


def origin_of(loss: Tensor) -> Any:
    """Return the operator that computed a number, before those that do not change it."""
    node: Any = loss.grad_fn
    while node is not None and type(node).__name__.startswith(PASSING):
        node = node.next_functions[0][0]
    return node


def is_mean_node(node: Any) -> bool:
    """Return whether an operator takes a mean."""
    kind = type(node).__name__
    if kind.startswith("AddBackward0"):
        return _smoothed(node) is not None
    return kind.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN


def _smoothed(node: Any) -> Any:
    """Return the cross entropy in one with smoothed labels, a mean; None if an operator adds other.

    With C classes it is ``(1 - s) * mean + s / C * sum``, the sum over classes and labels divided
    by the number of labels.
    """
    terms = [before for before, _ in node.next_functions if before is not None]
    if len(terms) != 2 or not all(type(one).__name__ == "MulBackward1" for one in terms):
        return None  # MulBackward1 multiplies by a number of Python's
    mean, spread = (one.next_functions[0][0] for one in terms)
    logits = _saved(mean, "_saved_self")
    if getattr(mean, "_saved_reduction", None) != _MEAN or logits is None or logits.dim() < 2:
        return None
    share, each = (float(one._saved_other) for one in terms)
    divided = type(spread).__name__.startswith("DivBackward")
    return mean if divided and _is(share + logits.shape[1] * each, 1.0) else None


def summed_tokens(node: Any) -> Tensor | float | None:
    """Return the number of label tokens that an operator has summed into a loss, or None.

    They are those of a cross entropy, of one per token or several of these, of a selection, or of a
    product with a mask of zeros and ones: NaN where that holds other numbers.
    """
    if getattr(node, "_saved_reduction", None) == _SUM:
        return _cross_entropy_tokens(node)
    if not type(node).__name__.startswith("SumBackward0"):
        return None
    before = node.next_functions[0][0]
    if type(before).__name__.startswith(_SELECTING):
        return float(math.prod(node._saved_self_sym_sizes))
    parts = _joined_in(before)
    counts = [count for count in map(_labels_of, parts) if count is not None]
    if counts and len(counts) == len(parts):
        return torch.stack(counts).sum()
    return _masked_tokens(before, node._saved_self_sym_sizes)


def averaged_tokens(node: Any) -> Tensor | float | None:
    """Return the number of label tokens whose mean an operator has taken as a loss, or None.

    They are those of a cross entropy or of a selection.
    """
    if type(node).__name__.startswith("AddBackward0"):
        node = _smoothed(node)
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return _cross_entropy_tokens(node)
    if not type(node).__name__.startswith("MeanBackward0"):
        return None
    before = node.next_functions[0][0]
    chosen = type(before).__name__.startswith(_SELECTING)
    return float(node._saved_self_sym_numel) if chosen else None


def _cross_entropy_tokens(node: Any) -> Tensor | None:
    """Return the number of labels that a cross entropy did not ignore.

    With weights of classes it keeps their sum, which is no count.
    """
    weighted = _cross_entropy_is_weighted(node)
    return None if weighted else _number(node, "_saved_total_weight")


def _cross_entropy_is_weighted(node: Any) -> bool:
    """Return whether a cross entropy has weights of classes, or may have."""
    try:
        hooked = is_hooked(node, "_saved_weight")
        return hooked or getattr(node, "_saved_weight", None) is not None
    except RuntimeError:  # changed in place since
        return True


def _joined_in(node: Any) -> list[Any]:
    """Return the operators whose outputs an operator joins; the operator itself if it does not."""
    joins = type(node).__name__.startswith(_JOINING)
    return [function for function, _ in node.next_functions] if joins else [node]


def _labels_of(node: Any) -> Tensor | None:
    """Return the number of labels that a cross entropy per token did not ignore, or None."""
    while node is not None and type(node).__name__.startswith(PASSING):
        node = node.next_functions[0][0]
    if getattr(node, "_saved_reduction", None) != _NONE:
        return None
    labels = _saved(node, "_saved_target")
    ignored = getattr(node, "_saved_ignore_index", None)
    if labels is None or ignored is None or _cross_entropy_is_weighted(node):
        return None
    return torch.count_nonzero(labels != ignored)


def _masked_tokens(node: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return the number of ones in the mask of a product of this shape; NaN if it is no mask."""
    if not shape or not type(node).__name__.startswith("MulBackward"):  # a number is no mask
        return None
    before = [function for function, _ in node.next_functions]
    if before.count(None) != 1:
        return None
    mask = _saved(node, "_saved_self" if before[0] is None else "_saved_other")
    if mask is None or tuple(mask.shape) != tuple(shape):
        return None
    with torch.no_grad():
        is_mask = mask.dtype == torch.bool or ((mask == 0) | (mask == 1)).all()
        total = mask.sum(dtype=torch.float64)
        return total if is_mask is True else torch.where(is_mask, total, math.nan)


def divisor_of(node: Any) -> Tensor | None:
    """Return the tensor of one number by which an operator has divided a loss, or None."""
    if not type(node).__name__.startswith("DivBackward"):
        return None
    whole = [function for function, _ in node.next_functions][1:] == [None]
    return _number(node, "_saved_other") if whole else None


def gathered_from(loss: Tensor, ends: Container[Any]) -> Iterator[float]:
    """Yield from how many ranks a loss has joined rows, where autograd has one rank's alone.

    That is the length of each tensor that was put together over that of its part with a graph.
    ``ends`` are operators that are not passed.
    """
    waiting = deque([loss.grad_fn])
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_GATHERED:
        node: Any = waiting.popleft()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        own = [(of, place) for of, place in node.next_functions if of is not None]
        if type(node).__name__.startswith(_JOINING) and 0 < len(own) < len(node.next_functions):
            lengths = [_length(*one) for one in own]
            if all(lengths):
                yield _length(node, 0) / sum(lengths)
        waiting.extend(of for of, _ in own)


def _length(node: Any, place: int) -> int:
    """Return the number of elements of an operator's output, by its place; 0 if unknown."""
    outputs = getattr(node, "_input_metadata", ())
    return math.prod(outputs[place].shape) if place < len(outputs) else 0


def _nodes_before(loss: Tensor) -> Iterator[Any]:
    """Yield the operators on scalars that a loss came from, the last ones first."""
    waiting = deque([(loss.grad_fn, loss.output_nr)])
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node, place = waiting.popleft()
        if node is None or node in seen or not _returns_scalar(node, place):
            continue
        seen.add(node)
        yield node
        waiting.extend(node.next_functions)


def _returns_scalar(node: Any, place: int) -> bool:
    """Return whether an output of an operator, by its place, is known to hold one number."""
    outputs = getattr(node, "_input_metadata", ())  # of the gradients that come in
    return place < len(outputs) and math.prod(outputs[place].shape) == 1


def _number(node: Any, name: str) -> Tensor | None:
    """Return a number that autograd has saved for an operator; None unless it is a single one."""
    saved = _saved(node, name)
    return saved if saved is not None and saved.numel() == 1 else None


def _saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that autograd has saved for an operator, None if it may not be read."""
    try:
        saved = None if is_hooked(node, name) else getattr(node, name, None)
    except RuntimeError:  # freed, or changed in place since
        return None
    if not isinstance(saved, Tensor) or isinstance(saved, DTensor):  # which may communicate
        return None
    return saved


def is_hooked(node: Any, name: str) -> bool:
    """Return whether a hook of the training's has packed a saved tensor.

    Only the training may unpack it: its hook may count the calls, or compute everything anew.
    """
    packed = getattr(node, _PACKED[name], None)
    return getattr(packed, "unpack_hook", None) is not None


def _is(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=1e-6)
