"""What a training's forward call may stand inside of, and what each of them notices of it.

A surrounding calls the model with a batch, and notes what it has counted in the loop: the tensors
that were saved, the operations, their FLOPs. Watched, it counts what it counts unwatched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from chaos_training import Loop
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

Calls = Callable[[Loop, Tensor], Any]
"""Calls the model of a loop with the inputs of a step."""

SURROUNDINGS: dict[str, Calls] = {}
"""All of them, by name."""


def _surrounding(name: str) -> Callable[[Calls], Calls]:
    def register(calls: Calls) -> Calls:
        SURROUNDINGS[name] = calls
        return calls

    return register


def _inside(name: str, surround: Callable[[], AbstractContextManager[Any]]) -> None:
    """Add what is a context manager, and counts nothing."""

    def calls(loop: Loop, inputs: Tensor) -> Any:
        with surround():
            return loop.model(inputs)

    SURROUNDINGS[name] = calls


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Counts what is called of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@_surrounding("checkpoint")
def in_checkpoint(loop: Loop, inputs: Tensor) -> Any:
    """Recompute the whole wrapped model in the backward pass."""
    return checkpoint(loop.model, inputs, use_reentrant=False)


@_surrounding("checkpoint without random state")
def in_plain_checkpoint(loop: Loop, inputs: Tensor) -> Any:
    """Do the same, and leave the random generators alone."""
    return checkpoint(loop.model, inputs, use_reentrant=False, preserve_rng_state=False)


@_surrounding("reentrant checkpoint")
def in_reentrant_checkpoint(loop: Loop, inputs: Tensor) -> Any:
    """Recompute it by a backward pass inside of the backward pass."""
    return checkpoint(loop.model, inputs.requires_grad_(), use_reentrant=True)


@_surrounding("selective checkpoint")
def in_selective_checkpoint(loop: Loop, inputs: Tensor) -> Any:
    """Keep the results of the matrix products, and recompute the rest."""
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(loop.model, inputs, use_reentrant=False, context_fn=contexts)


@_surrounding("saved tensors are counted")
def count_saved(loop: Loop, inputs: Tensor) -> Any:
    """Count the tensors that the graph keeps, and their bytes."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = loop.model(inputs)
    loop.noted.append(sorted(saved))
    return output


@_surrounding("FlopCounterMode")
def count_flops(loop: Loop, inputs: Tensor) -> Any:
    """Count floating-point operations."""
    counter: Any = FlopCounterMode(display=False)
    with counter:
        output = loop.model(inputs)
    loop.noted.append(counter.get_total_flops())
    return output


@_surrounding("dispatch mode")
def count_operations(loop: Loop, inputs: Tensor) -> Any:
    """Count operations."""
    with _Operations() as mode:
        output = loop.model(inputs)
    loop.noted.append(mode.count)
    return output


@_surrounding("function mode")
def count_functions(loop: Loop, inputs: Tensor) -> Any:
    """Count calls of torch's functions."""
    with _Functions() as mode:
        output = loop.model(inputs)
    loop.noted.append(mode.count)
    return output


_inside("save_on_cpu", save_on_cpu)
_inside("anomaly mode", torch.autograd.detect_anomaly)
_inside("profiler", torch.profiler.profile)
_inside("device context", partial(torch.device, "cpu"))
_inside("autocast", partial(torch.autocast, "cpu", torch.bfloat16))
