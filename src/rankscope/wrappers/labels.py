"""The label tokens among a model's inputs."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.gradients.kernels.native import count_labels
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.wrappers.ranks import local_of

_log = logging.getLogger("rankscope")


def count_label_tokens(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Return the number of label tokens in a model's inputs (float64 ``[1]``), None without labels.

    These are in ``labels``, whose first of each sequence is no target where they are ``shifted``,
    or in ``shift_labels`` that are aligned with what is predicted.
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
    return local_of(tensor.detach())


def problem_of(value: Any, weight: Any = None, **more: Any) -> str:
    """Return why something is no loss, or no weight of it, in words; empty if it is one.

    ``more`` are numbers that come with it, or None.
    """
    given = {"value": value, "weight": weight, **more}
    for name, each in given.items():
        if _shape_of(each) is None and (each is not None or name == "value"):
            kind = each.dtype if isinstance(each, Tensor) else type(each).__name__
            return f"loss() expected numbers or a tensor of them as {name}, got {kind}"
    shape = _shape_of(value)
    weights = _shape_of(weight)
    if shape is not None and len(shape) > 1:
        words = "a scalar or one loss per sample"
        return f"loss() expected {words}, got shape {tuple(shape)}; reduce it over tokens first"
    if shape is not None and weights is not None and shape.numel() != weights.numel():
        numbers = f"{weights.numel()} weights for {shape.numel()} losses"
        return f"loss() expected one weight per loss, got {numbers}"
    return ""


def _shape_of(value: Any) -> torch.Size | None:
    """Return the shape of real numbers; None of anything else."""
    if isinstance(value, float | int):
        return torch.Size()
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if tensor.is_complex() else tensor.shape


def shifts_labels(module: torch.nn.Module) -> bool:
    """Return whether a model predicts the next token, and shifts its labels by one itself.

    True for transformers' models, by their names and, where one name stands for two kinds, by
    whether they have an encoder. A wrapper of PEFT or ``torch.compile`` counts only where the model
    inside has none of these names.
    """
    known = (_shifts(layer) for layer in reversed(_layers(module)))
    return next((shifts for shifts in known if shifts is not None), False)


def _shifts(module: torch.nn.Module) -> bool | None:
    name = type(module).__name__
    if "ForConditionalGeneration" in name:
        encodes = getattr(getattr(module, "config", None), "is_encoder_decoder", None)
        return encodes is False and getattr(module, "loss_type", None) == "ForConditionalGeneration"
    return True if "CausalLM" in name or name.endswith("LMHeadModel") else None


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model and the models inside it, from the outside to the inside."""
    layers = [module]
    while (inner := _inside(layers[-1])) is not None and inner not in layers:
        layers.append(inner)
    return layers


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the model in a compiled one or in an adapter's, None where there is none."""
    inner = getattr(module, "_orig_mod", None)
    get_base_model = getattr(module, "get_base_model", None)
    if inner is None and callable(get_base_model):
        try:
            inner = get_base_model()
        except Exception:
            _log.debug("the model in %s is unknown", type(module).__name__, exc_info=True)
    return inner if isinstance(inner, torch.nn.Module) else None
