"""A worker's environment: versions, device, precision, variables, source revision."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankscope.bus.environment import PACKAGES, VARIABLES, without_addresses
from rankscope.bus.pace import PACE
from rankscope.bus.words import name_modules
from rankscope.errors import UsageError
from rankscope.gradients.fingerprint import digest_of
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.find import is_compiled

Fact = str | int | bool

_LONGEST_VALUE = 200
_GIT_SECONDS = 2.0
_COMPILER_OPTIONS = ("max_autotune", "triton.cudagraphs", "coordinate_descent_tuning")
"""Options that the modes of ``torch.compile`` set."""

FLAGS_EVERY = PACE.flags_every
"""Steps between two readings of torch's global settings."""


def environment_facts(device: torch.device) -> dict[str, Fact]:
    """Return the facts of this worker's environment, for ``run.json`` and to compare workers.

    Versions, the device of the model, torch's flags, and the source revision have names in lower
    case; environment variables have their own names. Missing and unreadable facts are left out.
    Only variables that are known to decide how a job computes are read, so that no secret is.
    """

    def variables() -> dict[str, Fact]:
        names = sorted(VARIABLES & os.environ.keys())
        return {name: without_addresses(os.environ[name])[:_LONGEST_VALUE] for name in names}

    return {
        **library_facts(device),
        **quietly(precision_flags),
        **quietly(variables),
        **quietly(lambda: source_revision(_script_directory())),
    }


def library_facts(device: torch.device) -> dict[str, Fact]:
    """Return the versions of Python, packages and libraries, and the device of the model."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **quietly(lambda: _versions_of(PACKAGES)),
        **quietly(_device_libraries),
        **quietly(lambda: _device(device)),
    }


@functools.cache
def _versions_of(packages: tuple[str, ...]) -> Mapping[str, Fact]:
    """Return the versions of installed packages, read once: it takes long, and does not change."""
    versions: dict[str, Fact] = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def compilation(model: torch.nn.Module) -> str:
    """Return which parts of a model are compiled, and their options; ``none`` without any."""
    found = {}
    for name, part in model.named_modules():
        if is_compiled(part):
            compiled: Any = getattr(part, "_compiled_call_impl", None) or part
            config = quietly(lambda of=compiled: of.get_compiler_config() or {})  # type: ignore[misc]
            chosen = [option for option in _COMPILER_OPTIONS if config.get(option)]
            found[canonical_name(name)] = ", ".join(chosen)
    if not found:
        return "none"
    options = " and ".join(dict.fromkeys(filter(None, found.values())))
    return f"{name_modules(list(found), found)}{f' with {options}' if options else ''}"


def vocabulary_digest(tokenizer: Any) -> int:
    """Return a 63-bit digest of a vocabulary: which token has which number.

    Takes an object with ``get_vocab()`` or a mapping from token to number, else raises UsageError.
    """
    get_vocab = getattr(tokenizer, "get_vocab", None)
    vocabulary = get_vocab() if callable(get_vocab) else tokenizer
    if not isinstance(vocabulary, Mapping):
        raise UsageError(
            "expected a tokenizer with get_vocab(), or a mapping from token to number, got "
            f"{type(tokenizer).__name__}; pass tokenizer.get_vocab() or such a mapping"
        )
    lines = sorted(f"{number} {token!r}" for token, number in vocabulary.items())
    return digest_of("\n".join(lines).encode("utf-8", "surrogatepass"))


def source_revision(directory: Path | None, seconds: float = _GIT_SECONDS) -> dict[str, Fact]:
    """Return a directory's git commit (``revision``), and whether files differ from it.

    Facts that git does not return within so many seconds are left out.
    """
    if directory is None:
        return {}
    end = time.monotonic() + seconds
    commit = _git(directory, end, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    changes = _git(directory, end, "status", "--porcelain", "--untracked-files=no")
    changed = {} if changes is None else {"revision_changed": bool(changes)}
    return {"revision": commit, **changed}


def _git(directory: Path, end: float, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.0, end - time.monotonic()),
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _script_directory() -> Path | None:
    """Return the directory of the script that runs; None in a notebook or an interpreter."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve().parent if file else None


def _device_libraries() -> dict[str, Fact]:
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    versions = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
    }
    facts: dict[str, Fact] = {name: str(version) for name, version in versions.items() if version}
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/driver/nvidia/version").read_text("utf-8", "replace")
        found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
        if found:
            facts["driver"] = found.group()
    return facts


def _device(device: torch.device) -> dict[str, Fact]:
    if device.type == "cpu":
        return {"device": platform.processor() or platform.machine() or "cpu"}
    module: Any = torch.get_device_module(device)
    facts: dict[str, Fact] = {"device": str(module.get_device_name(device))}
    properties = quietly(lambda: {"of": module.get_device_properties(device)}).get("of")
    memory = getattr(properties, "total_memory", None)
    return facts if memory is None else {**facts, "device_memory": int(memory)}


def quietly(collect: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return facts, or none if reading them fails: a job must not fail to start for them."""
    try:
        return collect()
    except Exception:
        return {}


class PrecisionMeter:
    """Reads the precision of each step's first forward pass.

    Autocast is read in every step, torch's global settings in steps that are multiples of
    ``FLAGS_EVERY``, on all workers alike: scripts set them once, and they take long to read.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._flags: dict[str, str | bool] | None = None
        self._codes: dict[str, int] = {}

    def code(self, step: int) -> int:
        """Return a 63-bit digest of :func:`precision_words`; equal on workers that compute alike.

        Called inside a forward pass, where autocast is active. It costs some microseconds.
        """
        if self._flags is None or step % FLAGS_EVERY == 0:
            flags = precision_flags()
            if flags != self._flags:
                self._flags = flags
                self._codes.clear()
        autocast = _autocast(self._device.type)
        code = self._codes.get(autocast)
        if code is None:
            words = tuple(precision_words(self._module, self._device).values())
            code = self._codes[autocast] = digest_of(repr(words).encode())
        return code


def precision_words(module: torch.nn.Module, device: torch.device) -> dict[str, str | bool]:
    """Return the settings that decide the precision of a forward pass, by name."""
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    return {
        "parameter_types": ", ".join(sorted(types)) or "none",
        "autocast": _autocast(device.type),
        **precision_flags(),
    }


def precision_flags() -> dict[str, str | bool]:
    """Return torch's global settings of precision and determinism, by name."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
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
        "cudnn": bool(cudnn.enabled),
        "mkldnn": bool(mkldnn.enabled),
        "mkldnn_matmul": _fp32(mkldnn.matmul),
        "attention_fast_path": torch.backends.mha.get_fastpath_enabled(),
        "attention_backends": _attention_backends(),
    }


def _attention_backends() -> str:
    """Return the kernels that scaled dot-product attention may use."""
    cuda: Any = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled,
        "mem_efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
    }
    return ", ".join(name for name, is_enabled in enabled.items() if is_enabled())


def _float32_matmul() -> str:
    """Return the setting of all backends; ``mixed`` where one of them was set by itself.

    torch raises there: as soon as a script sets ``fp32_precision`` alone, for example.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def _fp32(operations: Any) -> str:
    """Return ``tf32``, or ``ieee`` for full float32; ``allow_tf32`` may raise."""
    precision = str(operations.fp32_precision)
    return "ieee" if precision == "none" else precision


def _autocast(device_type: str) -> str:
    try:
        if torch.is_autocast_enabled(device_type):
            return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    except RuntimeError:  # a kind of device that has no autocast
        pass
    return "off"
