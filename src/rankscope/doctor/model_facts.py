"""What one rank's model and optimizer are made of, as digests and plain values."""

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankscope.capture.state.digest import digest_tensor
from rankscope.capture.state.fingerprint import digest_of, numpy_state, python_state, torch_state
from rankscope.doctor.stage import Bench, Facts
from rankscope.errors import UsageError

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def look(bench: Bench) -> Facts:
    """Build the model and the optimizer, and digest what they hold.

    Raises:
        UsageError: The functions return something else.
    """
    model, optimizer = _build(bench)
    bench.model = model
    parts = _parts(model)
    return {
        "rng": _generators(bench.device),
        "parameters": _tensors(model.named_parameters(), parts),
        "buffers": _tensors(model.named_buffers()),
        "wrapped": type(model).__name__ in _WRAPPERS or hasattr(model, "reshard"),
        "dropout": dropouts(model),
        "batch_norms": _batch_norms(model),
        "optimizer": None if optimizer is None else _optimizer(optimizer, parts),
    }


def _build(bench: Bench) -> tuple[nn.Module, Any]:
    built = bench.functions["model"]()
    model, optimizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            "--model expected a function that returns a torch module, or (module, optimizer); it "
            f"returned {type(built).__name__}"
        )
    if "optimizer" in bench.functions:
        optimizer = bench.functions["optimizer"](model)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"expected an optimizer with param_groups, got {type(optimizer).__name__}; return a "
            "torch optimizer"
        )
    return model, optimizer


def _generators(device: torch.device) -> dict[str, int]:
    states = {
        "Python": digest_of(python_state()),
        "numpy": digest_of(numpy_state()),
        "torch": digest_of(torch_state()),
    }
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states["device"] = digest_of(module.get_rng_state(device).cpu().numpy().tobytes())
    return states


def _tensors(
    named: Iterator[tuple[str, Tensor]], parts: Container[int] = ()
) -> dict[str, list[Any]]:
    """Return shape, type and digest of each tensor; the digest is None without one to compare.

    Args:
        named: The tensors.
        parts: Those of which a rank holds a part in a plain tensor, see :func:`_parts`.
    """
    found: dict[str, list[Any]] = {}
    pending: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            found[name] = ["not initialised", str(tensor.dtype), None]
            continue
        found[name] = [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), None]
        if id(tensor) in parts:
            found[name][0] = "a part"  # which may be of another size on each rank
        elif not tensor.is_meta and not _is_split(tensor):
            pending.append((name, digest_tensor(tensor)))
    for name, digest in pending:
        found[name][2] = int(digest.item())
    return found


def _parts(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters of which each rank holds a part, as plain tensors tell nothing.

    These are all inside of ``FullyShardedDataParallel`` (FSDP1), those that it was told to ignore
    included: with ``use_orig_params`` they look alike.
    """
    return frozenset(
        id(parameter)
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module.sharding_strategy is not ShardingStrategy.NO_SHARD
        for parameter in module.parameters()
    )


def _is_split(tensor: Tensor) -> bool:
    """Return whether a tensor says itself that each rank holds a part, which no other has."""
    return isinstance(tensor, DTensor) and any(isinstance(p, Shard) for p in tensor.placements)


def dropouts(model: nn.Module) -> list[str]:
    """Return the names of modules that drop at random while training.

    These are dropout modules, and modules with a number above 0 under a name with ``drop`` in it,
    as recurrent layers and attention blocks have.
    """
    return [
        name or type(module).__name__ for name, module in model.named_modules() if _drops(module)
    ]


def _drops(module: nn.Module) -> bool:
    if "drop" in type(module).__name__.lower():
        rates = [getattr(module, name, None) for name in ("p", "drop_prob", "drop_rate")]
    else:
        rates = [value for name, value in vars(module).items() if "drop" in name.lower()]
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _batch_norms(model: nn.Module) -> list[str]:
    kinds = nn.modules.batchnorm._BatchNorm
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not isinstance(module, nn.SyncBatchNorm)
    ]


def _optimizer(optimizer: Any, parts: Container[int]) -> dict[str, Any]:
    settings: dict[str, Any] = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        settings[f"group {number}: number of parameters"] = len(group["params"])
        for key, value in group.items():
            if key not in ("params", "param_names"):
                settings[f"group {number}: {key}"] = _plain(value)
    return {"settings": settings, "state": _optimizer_state(optimizer, parts)}


def _optimizer_state(optimizer: Any, parts: Container[int]) -> dict[str, list[Any]]:
    """Return what an optimizer remembers, by position of the parameter and name.

    What belongs to a rank's part of a parameter is left out: no other rank has the same.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    tensors: list[tuple[str, Tensor]] = []
    for number, parameter in enumerate(parameters):
        if id(parameter) in parts:
            continue
        entry = state.get(parameter, {}) if isinstance(state, Mapping) else {}
        items = entry.items() if isinstance(entry, Mapping) else ()
        tensors += [(f"{number} {key}", value) for key, value in items if isinstance(value, Tensor)]
    return _tensors(iter(tensors))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value).__name__
