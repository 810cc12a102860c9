"""What a canary derives: the loss that a model returns, or a projection of its outputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankscope.capture.canary.batch import CanaryDeclined
from rankscope.capture.fold import fold_signs
from rankscope.capture.passes import tensors_in

_PERIOD = 8191  # of the signs that project outputs


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model's output holds, or else a projection of all outputs.

    The projection is the sum of each floating-point output times a fixed pattern of signs, in
    float32: it has a gradient, and it notices changes of any element.

    Raises:
        CanaryDeclined: There is no floating-point output.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return loss if loss.numel() == 1 else loss.float().mean()
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output.float()
    floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not floating:
        raise CanaryDeclined("the model returns no loss and no floating-point tensor")
    device = floating[0].device
    with torch.autocast(device.type, enabled=False):
        return torch.stack([_project(tensor).to(device) for tensor in floating]).sum()


def _project(output: Tensor) -> Tensor:
    """Return the sum of a tensor times a fixed pattern of signs, over the root of its size."""
    flat = output.reshape(-1).float()
    rows, signs = flat.numel() // _PERIOD, fold_signs(_PERIOD, 1, flat.device)
    body, tail = flat[: rows * _PERIOD], flat[rows * _PERIOD :]
    row_signs = fold_signs(rows, 2, flat.device)
    total = ((body.reshape(rows, _PERIOD) * signs).sum(1) * row_signs).sum()
    return (total + (tail * signs[: len(tail)]).sum()) / math.sqrt(max(flat.numel(), 1))
