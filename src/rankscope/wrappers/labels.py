"""The label tokens among a model's inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.gradients.kernels.inputs import count_labels

IGNORED_LABEL = -100


def count_label_tokens(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Return the number of label tokens in a model's inputs (float64 ``[1]``), None without labels.

    Args:
        inputs: With ``labels``, or ``shift_labels`` that are aligned with what is predicted.
        shifted: Whether the first of ``labels`` of each sequence is not a target.
    """
    labels, first = labels_in(inputs, shifted=shifted)
    if labels is None:
        return None
    count = count_labels(labels, IGNORED_LABEL, first=first)
    if count is not None:
        return torch.tensor([count], dtype=torch.float64, device=labels.device)
    labels = labels[..., first:] if first else labels
    return (own(labels) != IGNORED_LABEL).sum(dtype=torch.float64).reshape(1)


def labels_in(inputs: Mapping[str, Any], *, shifted: bool) -> tuple[Tensor | None, int]:
    """Return the labels, and the place of the first that is a target in each sequence."""
    labels = inputs.get("shift_labels")
    first = 0
    if not isinstance(labels, Tensor):
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return None, 0
        first = int(shifted and labels.dim() > 1)
    return (None if is_spread(labels) else labels), first


def is_spread(value: Any) -> bool:
    """Return whether this rank holds a part of a tensor only."""
    return isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)


def own(tensor: Tensor) -> Tensor:
    """Return a tensor, all of which this rank holds, as an ordinary one without a graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
