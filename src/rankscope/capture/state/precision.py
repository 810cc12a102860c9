"""The precision in which a forward pass computes, in words and as one number to compare."""

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rankscope.capture.state.fingerprint import digest_of

_types: "WeakKeyDictionary[torch.nn.Module, str]" = WeakKeyDictionary()


FLAGS_EVERY = 16
"""Steps from one look at torch's global settings to the next."""


class PrecisionMeter:
    """Tells the precision of each step's first forward pass.

    Autocast is looked at in every step, torch's global settings in steps that are multiples of
    ``FLAGS_EVERY``, on all workers alike: scripts set them once, and they take long to read.

    Args:
        module: The model.
        device: Where it computes.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._flags: dict[str, str | bool] | None = None
        self._codes: dict[str, int] = {}

    def code(self, step: int) -> int:
        """Return :func:`precision_code`; to be called inside the forward pass."""
        if self._flags is None or step % FLAGS_EVERY == 0:
            flags = precision_flags()
            if flags != self._flags:
                self._flags = flags
                self._codes.clear()
        autocast = _autocast(self._device.type)
        code = self._codes.get(autocast)
        if code is None:
            code = self._codes[autocast] = precision_code(self._module, self._device)
        return code


def precision_code(module: torch.nn.Module, device: torch.device) -> int:
    """Return a 63-bit digest of :func:`precision_words`; equal on workers that compute alike.

    Called inside a forward pass, where autocast is active. It costs some microseconds.

    Args:
        module: The model; the types of its parameters are looked up once.
        device: Where it computes.
    """
    return _digest(tuple(precision_words(module, device).values()))


def precision_words(module: torch.nn.Module, device: torch.device) -> dict[str, str | bool]:
    """Return what decides the precision of a forward pass, by name.

    Args:
        module: The model.
        device: Where it computes.
    """
    if module not in _types:
        found = {str(parameter.dtype) for parameter in module.parameters()}
        _types[module] = ", ".join(sorted(found)).replace("torch.", "") or "none"
    return {
        "parameter_types": _types[module],
        "autocast": _autocast(device.type),
        **precision_flags(),
    }


def precision_flags() -> dict[str, str | bool]:
    """Return torch's global settings of precision and determinism, by name."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul": _float32_matmul(),
        "tf32_matmul": _fp32(matmul),
        "tf32_convolutions": _fp32(cudnn.conv),
        "reduced_fp16_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
        "reduced_bf16_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(cudnn.deterministic),
        "cudnn_benchmark": bool(cudnn.benchmark),
    }


def _float32_matmul() -> str:
    """Return the setting of all backends; ``mixed`` where one of them was set by itself.

    torch raises there: as soon as a script sets ``fp32_precision`` alone, for example.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def _fp32(operations: Any) -> str:
    """Return ``tf32``, or ``ieee`` where float32 is what it says; ``allow_tf32`` may raise."""
    precision = str(operations.fp32_precision)
    return "ieee" if precision == "none" else precision


def _autocast(device_type: str) -> str:
    try:
        if torch.is_autocast_enabled(device_type):
            return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    except RuntimeError:  # a kind of device that has no autocast
        pass
    return "off"


@functools.lru_cache(maxsize=64)
def _digest(words: tuple[str | bool, ...]) -> int:
    return digest_of(repr(words).encode())
