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
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from rankscope.bus.environment import PACKAGES, VARIABLES, precision_digest, without_addresses
from rankscope.bus.pace import PACE
from rankscope.bus.words import dtype_name, name_modules
from rankscope.errors import UsageError
from rankscope.gradients.digest import known_shape
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.datasets import digests_by_field, repeats_rows
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
_SAMPLER_SETTINGS = ("shuffle", "seed", "drop_last", "replacement")
_LOADER_SETTINGS = ("batch_size", "num_workers", "drop_last", "prefetch_factor", "pin_memory")
_MAX_GROUPS = 64  # parameter groups that are written out
_PARTS = (
    "base_dataloader",  # accelerate's wrapper
    "batch_sampler",
    "sampler",
    "dataset",
    "source",
)
_LISTS_OF_PARTS = (
    "datasets",  # torch's ConcatDataset and ChainDataset
    "pipeline",  # webdataset's stages, its loader's included
)
_MAX_VISITED = 64
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
        "model": quietly(lambda: {"class": _class_of(module), **_unsaved_buffers(module)}),
        "parameters": quietly(lambda: _parameters(module)),
        "reduction": quietly(lambda: _reduction(wrapped, group)),
        "optimizer": None if optimizer is None else quietly(lambda: _optimizer(optimizer)),
        "loader": None if loader is None else quietly(lambda: _loader(loader)),
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
        "class": ", ".join(map(_class_of, all_of(optimizer))),
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


def _loader(loader: Any) -> Facts:
    facts: Facts = {"class": _class_of(loader), **settings_of(loader, _LOADER_SETTINGS)}
    for name in ("sampler", "batch_sampler"):
        sampler = _quietly_of(loader, name)
        if sampler is not None:
            facts[name] = {"class": _class_of(sampler), **settings_of(sampler, _SAMPLER_SETTINGS)}
    data: Any = _quietly_of(loader, "dataset")
    if data is not None:
        facts["dataset"] = {"class": _class_of(data), **quietly(lambda: {"length": len(data)})}
    generator = _quietly_of(loader, "generator")
    if isinstance(generator, torch.Generator):
        facts["seed"] = generator.initial_seed()
    return facts


def sampler_seed(loader: Any) -> int | None:
    """Return the seed with which a data loader's samples are shuffled; None if unknown.

    That of a sampler with a ``seed`` (``DistributedSampler``) or ``initial_seed`` (accelerate's),
    unless it does not shuffle, or of the generator that torch's own samplers draw from.
    """
    if loader is None or _quietly_of(loader, "synchronized_generator") is not None:
        return None  # accelerate gives all ranks the generator of rank 0 with each pass
    batches = _quietly_of(loader, "batch_sampler")
    batches = _quietly_of(batches, "batch_sampler") or batches  # inside accelerate's share of it
    for sampler in (_quietly_of(loader, "sampler"), _quietly_of(batches, "sampler"), batches):
        if sampler is None or _quietly_of(sampler, "shuffle") is False:
            continue
        for name in ("seed", "initial_seed"):
            seed = _quietly_of(sampler, name)
            if isinstance(seed, int) and not isinstance(seed, bool):
                return seed
        generator = _quietly_of(sampler, "generator")
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return None


def settings_of(owner: object, names: Iterable[str]) -> Facts:
    """Return the attributes of an object that are numbers or words, by name."""
    found = {name: _quietly_of(owner, name) for name in names}
    return {name: v for name, v in found.items() if isinstance(v, bool | int | float | str)}


def _quietly_of(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # a property may do anything
        return None


def _class_of(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


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
    return _class_of(value)


def draws_with_replacement(loader: Any) -> bool:
    """Return whether a data loader declares that it draws samples, or shards, with replacement.

    That is torch's samplers with ``replacement=True``, those of repeated augmentation, and
    webdataset's ``ResampledShards`` (``WebDataset(resampled=True)``) or a class of that name.
    """
    return any(map(_replaces, _inside(loader)))


def splits_of(loader: Any) -> list[tuple[str, int]]:
    """Return what in a data loader gives each rank a part of the data, and into how many parts.

    That is a sampler or data set with ``num_replicas`` and ``rank`` (``DistributedSampler``) or
    ``num_processes`` and ``process_index`` (accelerate's), one that ``split_dataset_by_node`` of
    ``datasets`` has made, and accelerate's loader that deals out what rank 0 reads.
    """
    found: dict[int, tuple[str, int]] = {}
    for part in _inside(loader):
        number = _parts_made_by(part)
        if number is not None and number > 1:
            found[id(part)] = (type(part).__name__, number)
    return list(found.values())


def splitting_loader() -> Any:
    """Return the living data loader that splits its data into the most parts; None without any.

    Of several, that of the most rows, as a data set for evaluation has fewer.
    """

    def size(loader: Any) -> tuple[int, int]:
        return math.prod(n for _, n in splits_of(loader)), rows_of(loader) or 0

    loaders = [each for each in live_objects(DataLoader)[DataLoader] if splits_of(each)]
    return max(loaders, key=size, default=None)


def _parts_made_by(part: Any) -> int | None:
    for number, place in (("num_replicas", "rank"), ("num_processes", "process_index")):
        found = _quietly_of(part, number), _quietly_of(part, place)
        if all(isinstance(one, int) for one in found):
            return int(found[0])
    by_node = _quietly_of(_quietly_of(part, "_distributed"), "world_size")
    if isinstance(by_node, int):
        return by_node
    if type(part).__name__ == "DataLoaderDispatcher":
        dealt = _quietly_of(_quietly_of(part, "state"), "num_processes")
        return dealt if isinstance(dealt, int) else None
    return None


def order_of(loader: Any) -> str:
    """Return what decides the order of a loader's data; empty if unknown.

    "nothing" where it does not shuffle, "set_epoch" where a part has that method, "generator" where
    torch's ``RandomSampler`` draws.
    """
    parts = list(_inside(loader))
    samplers = [part for part in parts if isinstance(part, Sampler)]
    if any(type(s) is SequentialSampler or _quietly_of(s, "shuffle") is False for s in samplers):
        return "nothing"
    if any(callable(_quietly_of(part, "set_epoch")) for part in parts[1:]):
        return "set_epoch"
    return "generator" if any(type(sampler) is RandomSampler for sampler in samplers) else ""


def length_of(loader: Any) -> int | None:
    """Return how many samples a loader's iterable data set has, by its own word, if known."""
    known = []
    for part in _inside(loader):
        if isinstance(part, IterableDataset):
            with contextlib.suppress(Exception):  # most have no length
                known.append(len(part))  # type: ignore[arg-type]
    return max(known, default=None)


def rows_of(loader: Any) -> int | None:
    """Return how many rows the data set of a loader has; without one, those of all living loaders.

    None where a data set is iterable: it may yield any number of rows.
    """
    loaders = live_objects(DataLoader)[DataLoader] if loader is None else [loader]
    sets = {id(data): data for data in (_quietly_of(each, "dataset") for each in loaders)}
    rows = []
    for data in sets.values():
        if data is None or isinstance(data, IterableDataset):
            return None
        with contextlib.suppress(Exception):  # some have no length
            rows.append(len(data))
    return sum(rows) or None


_PLACES = 4096


def data_digest_of(loader: Any) -> int | None:
    """Return a digest of which rows a loader's data set has, as far as none has to be made.

    Of a ``torch.utils.data.Subset``, that is its places, some thousands of them; of a table of
    ``datasets``, the first and the last row as they are stored. None of others.
    """
    for part in _inside(loader):
        with contextlib.suppress(Exception):
            if isinstance(part, Subset):
                places = part.indices
                few = range(0, len(places), len(places) // _PLACES + 1)
                return digest_of(repr([len(places), *(places[at] for at in few)]).encode())
            if type(part).__module__ == "datasets.arrow_dataset":
                stored = part.with_format("arrow")
                ends = [stored[at].to_pydict() for at in (0, len(part) - 1)]
                return digest_of(repr(ends).encode())
    return None


def data_fields_of(loader: Any) -> list[int]:
    """Return digests of what the data set of a loader stores of its rows: one that ranks share."""
    return digests_by_field(_quietly_of(loader, "dataset"))


def _inside(loader: Any) -> Iterator[Any]:
    """Yield a loader and its parts, each once; nothing of them is read or called."""
    waiting = deque([loader])
    visited: set[int] = set()
    while waiting and len(visited) < _MAX_VISITED:
        part = waiting.popleft()
        if part is not None and id(part) not in visited:
            visited.add(id(part))
            yield part
            waiting.extend(_parts_of(part))


def _replaces(part: Any) -> bool:
    if any(kind.__name__.startswith("ResampledShards") for kind in type(part).__mro__):
        return True
    if isinstance(part, Sampler) and repeats_rows(part):
        return True
    return _quietly_of(part, "replacement") is True


def _parts_of(part: Any) -> Iterator[Any]:
    for name in _PARTS:
        value = _quietly_of(part, name)
        if value is not None:  # a list is the data themselves, and has no parts
            yield value
    for name in _LISTS_OF_PARTS:
        value = _quietly_of(part, name)
        if isinstance(value, list | tuple):
            yield from value
