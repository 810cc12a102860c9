"""A worker's environment: versions, device, precision, variables, source revision."""

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.bus.environment import PACKAGES, VARIABLES, precision_digest, without_addresses
from rankscope.bus.pace import PACE
from rankscope.bus.words import dtype_name, name_modules
from rankscope.errors import UsageError
from rankscope.gradients.digest import known_shape
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.datasets import class_of, loader_facts, quietly
from rankscope.wrappers.living import framework, live_objects
from rankscope.wrappers.optimizers import all_of, held_bits, held_names
from rankscope.wrappers.wrapped import Wrapped, is_compiled

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
    """Return a digest of a mapping from token to number, or of what ``get_vocab`` returns."""
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
    """Return a directory's git commit, and whether files differ from it, if git is quick."""
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
        self._known: set[int] = set()
        self._words: dict[str, str] = {}

    def code(self, step: int) -> int:
        """Return a digest of :func:`precision_words`; equal on workers that compute alike."""
        if self._flags is None or step % FLAGS_EVERY == 0:
            flags = precision_flags()
            if flags != self._flags:
                self._flags = flags
                self._codes.clear()
        autocast = _autocast(self._device.type)
        code = self._codes.get(autocast)
        if code is None:
            words = precision_words(self._module, self._device)
            code = self._codes[autocast] = precision_digest(words)
            if code not in self._known:
                self._known.add(code)
                self._words = {name: str(value) for name, value in words.items()}
        return code

    def take_words(self) -> dict[str, str]:
        """Return the settings behind the last digest, where it is the first of its kind."""
        words, self._words = self._words, {}
        return words


def precision_words(module: torch.nn.Module, device: torch.device) -> dict[str, str | bool]:
    """Return the settings that decide the precision of a forward pass, by name."""
    types = {dtype_name(parameter.dtype) for parameter in module.parameters()}
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
        "default_dtype": dtype_name(torch.get_default_dtype()),
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
    return " or ".join(name for name, is_enabled in enabled.items() if is_enabled())


def _float32_matmul() -> str:
    """Return the setting of all backends; ``mixed`` where one of them was set by itself."""
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
            return dtype_name(torch.get_autocast_dtype(device_type))
    except RuntimeError:  # a kind of device that has no autocast
        pass
    return "off"


Facts = dict[str, Any]
_MOST_NAMED = 256  # buffers

_UNSAID = frozenset({"params", "param_names"})
_MAX_GROUPS = 64  # parameter groups that are written out
_MAX_NAMES = 8  # of parameters that are not watched


def training_facts(
    wrapped: Wrapped, optimizer: Any, loader: Any, group: dist.ProcessGroup
) -> Facts:
    """Return the facts of a training by stable names; ``optimizer`` and ``loader`` may be None.

    ``unwatched`` has names of parameters of the optimizer that are none of the model's. ``unheld``
    has the number of the model's that are in no optimizer, and names, where a loop reduces.
    ``declared_micro_batches`` is what Accelerate was given as gradient_accumulation_steps.
    """
    module = wrapped.module
    return {
        "seed": torch.initial_seed(),
        "model": quietly(lambda: {"class": class_of(module), **_unsaved_buffers(module)}),
        "parameters": quietly(lambda: _parameters(module)),
        "reduction": quietly(lambda: _reduction(wrapped, group)),
        "optimizer": None if optimizer is None else quietly(lambda: _optimizer(optimizer)),
        "loader": None if loader is None else quietly(lambda: loader_facts(loader)),
        **quietly(lambda: _unwatched(module, optimizer)),
        **quietly(lambda: _unheld(wrapped, optimizer)),
        **quietly(_declared),
    }


def _declared() -> Facts:
    """Return by how many micro-batches Accelerate divides each loss that it gets."""
    kind = framework("accelerate.accelerator")
    found = live_objects(kind)[kind] if kind else ()
    numbers = {int(each.gradient_accumulation_steps) for each in found}
    return {"declared_micro_batches": numbers.pop()} if len(numbers) == 1 else {}


def _unsaved_buffers(module: nn.Module) -> Facts:
    """Return names of some buffers that no checkpoint holds, registered with persistent=False."""
    names = [
        canonical_name(f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set)
    ]
    return {"unsaved_buffers": names[:_MOST_NAMED]} if names else {}


def _unheld(wrapped: Wrapped, optimizer: Any) -> Facts:
    if not wrapped.kind.by_loop or optimizer is None:
        return {}
    named = wrapped.parameters
    if not held_bits(optimizer, named):
        return {}
    names = sorted(named.keys() - held_names(optimizer, named))
    return {"unheld": {"tensors": len(names), "names": names[:_MOST_NAMED]}}


def _parameters(module: nn.Module) -> Facts:
    """Return the parameters' number, types, and a digest of names, shapes and types."""
    named = [(canonical_name(name), p) for name, p in module.named_parameters()]
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    lines = [f"{name} {_shape(p)} {dtype_name(p.dtype)} {p.requires_grad}" for name, p in named]
    buffers = [f"{name} {_shape(b)} {dtype_name(b.dtype)}" for name, b in module.named_buffers()]
    return {
        "tensors": len(named),
        "elements": sum(math.prod(_shape(p)) for _, p in named),
        "trained_tensors": len(trained),
        "trained_elements": sum(math.prod(_shape(p)) for p in trained),
        "types": dict(sorted(Counter(dtype_name(p.dtype) for _, p in named).items())),
        "layout": digest_of("\n".join([*lines, "", *buffers]).encode()),
    }


def _reduction(wrapped: Wrapped, group: dist.ProcessGroup) -> Facts:
    settings = {name: plain_value(value) for name, value in wrapped.settings().items()}
    backend = str(dist.get_backend(group))
    return {"class": type(wrapped.wrapper).__name__, "backend": backend, **settings}


def _optimizer(optimizer: Any) -> Facts:
    groups = _own_groups(optimizer.param_groups)
    return {
        "class": ", ".join(map(class_of, all_of(optimizer))),
        "groups": [_group(group) for group in groups[:_MAX_GROUPS]],
        "num_groups": len(groups),
    }


def _own_groups(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the groups without those that an optimizer inside of another repeats."""
    seen: set[int] = set()
    own = []
    for group in groups:
        held = set(map(id, group["params"]))
        if not held or held - seen:
            own.append(group)
        seen |= held
    return own


def _unwatched(module: nn.Module, optimizer: Any) -> Facts:
    """Return names of the parameters that an optimizer updates beside a model's."""
    own = set(map(id, module.parameters()))
    groups = getattr(optimizer, "param_groups", None) or ()
    foreign = {id(p) for group in groups for p in group["params"]} - own
    return {"unwatched": owned_names(foreign)[:_MAX_NAMES]} if foreign else {}


def owned_names(parameters: Container[int]) -> list[str]:
    """Return a name of each of some parameters, given by ids, in a module that holds it."""
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    names: dict[int, str] = {}
    for module in modules:
        if isinstance(module, torch.fx.GraphModule):  # of the compiler
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in parameters:
                own = f"{type(module).__name__}.{name}"
                names[id(parameter)] = min(own, names.get(id(parameter), own))
    return sorted(names.values())


def _group(group: Mapping[str, Any]) -> Facts:
    settings = {
        str(name): plain_value(value) for name, value in group.items() if name not in _UNSAID
    }
    return {**settings, "tensors": len(group["params"])}


def _shape(tensor: Tensor) -> tuple[int, ...]:
    shape = getattr(tensor, "ds_shape", None) or known_shape(tensor)  # the former: of ZeRO 3
    return tuple(shape)


def plain_value(value: object) -> object:
    """Return a value as JSON can hold it, else its class."""
    if isinstance(value, Tensor):  # elsewhere it would wait
        value = value.item() if value.device.type == "cpu" and value.numel() == 1 else value.dtype
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return class_of(value)
