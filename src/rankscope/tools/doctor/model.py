"""Whether all ranks start from the same model and optimizer, with random numbers of their own."""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankscope.bus.replicas import minority_ranks, ranks_by
from rankscope.bus.words import count, dtype_name, first_of, name_ranks
from rankscope.errors import UsageError
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.fingerprint import numpy_state, python_state, torch_state
from rankscope.private import find
from rankscope.stats.arrays import digest_of
from rankscope.tools.doctor.stage import (
    ALONE,
    FUNCTION_ADVICE,
    Bench,
    CheckResult,
    Facts,
    PreflightStage,
    Status,
)
from rankscope.wrappers.facts import plain_value

Table = Mapping[str, Sequence[Any]]
"""Shape, type and digest of each tensor by name; the digest is None without one to compare."""

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def look(bench: Bench) -> Facts:
    """Build and digest model and optimizer; UsageError if a function returns something else."""
    model, optimizer = _build(bench)
    bench.model = model
    parts = _parts(model)
    return {
        "rng": _generators(bench.device),
        "parameters": _described(model.named_parameters(), parts),
        "buffers": _described(model.named_buffers()),
        "wrapped": type(model).__name__ in _WRAPPERS or hasattr(model, "reshard"),
        "dropout": dropouts(model),
        "batch_norms": _norms_in(model),
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


def _described(
    named: Iterator[tuple[str, Tensor]], parts: Container[int] = ()
) -> dict[str, list[Any]]:
    """Return shape, type and digest of each tensor; the digest is None for one in ``parts``."""
    found: dict[str, list[Any]] = {}
    pending: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            found[name] = ["not initialised", str(tensor.dtype), None]
            continue
        found[name] = [list(tensor.shape), dtype_name(tensor.dtype), None]
        if id(tensor) in parts:
            found[name][0] = "a part"  # which may be of another size on each rank
        elif not tensor.is_meta and not (  # a type that shows that each rank holds a part
            isinstance(tensor, DTensor) and any(isinstance(p, Shard) for p in tensor.placements)
        ):
            pending.append((name, digest_tensor(tensor)))
    for name, digest in pending:
        found[name][2] = int(digest.item())
    return found


def _parts(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters whose plain tensors hold only a part of them on each rank.

    These are all inside of ``FullyShardedDataParallel`` (FSDP1), its ignored parameters included:
    with ``use_orig_params`` they look alike.
    """
    return frozenset(
        id(parameter)
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module.sharding_strategy is not ShardingStrategy.NO_SHARD
        for parameter in module.parameters()
    )


def dropouts(model: nn.Module) -> list[str]:
    """Return the names of modules that drop at random while training, dropout's or others'."""
    return [
        name or type(module).__name__ for name, module in model.named_modules() if _drops(module)
    ]


def _drops(module: nn.Module) -> bool:
    if "drop" in type(module).__name__.lower():
        rates = [getattr(module, name, None) for name in ("p", "drop_prob", "drop_rate")]
    else:
        rates = [value for name, value in vars(module).items() if "drop" in name.lower()]
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _norms_in(model: nn.Module) -> list[str]:
    kinds: Any = find("torch.nn.modules.batchnorm._BatchNorm") or ()
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
                settings[f"group {number}: {key}"] = plain_value(value)
    return {"settings": settings, "state": _optimizer_state(optimizer, parts)}


def _optimizer_state(optimizer: Any, parts: Container[int]) -> dict[str, list[Any]]:
    """Return an optimizer's state, by position of the parameter and name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    tensors: list[tuple[str, Tensor]] = []
    for number, parameter in enumerate(parameters):
        if id(parameter) in parts:
            continue
        entry = state.get(parameter, {}) if isinstance(state, Mapping) else {}
        items = entry.items() if isinstance(entry, Mapping) else ()
        tensors += [(f"{number} {key}", value) for key, value in items if isinstance(value, Tensor)]
    return _described(iter(tensors))


def _tensors(name: str, facts: Sequence[Facts]) -> CheckResult:
    """Compare names, shapes, types and bits of parameters or buffers."""
    tables: list[Table] = [fact[name] for fact in facts]
    what = name.removesuffix("s")
    other = _other_layout(name, what, tables)
    if other:
        return other
    different = _differing(tables)
    numbers = {"tensors": len(tables[0]), "different": different}
    if not different:
        return _equal(name, what, tables, numbers)
    ranks = minority_ranks([tuple(table[key][2] for key in different) for table in tables])
    who = "all ranks differ" if len(ranks) == len(facts) else f"{name_ranks(ranks)} differ"
    if len(ranks) == 1:
        who = f"{name_ranks(ranks)} differs"
    total = count(len(tables[0]), what)
    found = f"{who} in {len(different)} of {total}: {first_of(different)}"
    if name == "parameters" and not facts[0]["wrapped"] and _looks_unseeded(tables, different):
        found += "; every rank seems to begin from random numbers of its own"
        return CheckResult(Status.WARNING, found, _UNSEEDED, numbers, ranks)
    wrapped = "after wrapping" if facts[0]["wrapped"] else "before wrapping"
    advice = {
        "buffers": "No gradient ever repairs a buffer: build or load buffers alike on all ranks, "
        "and let DDP broadcast them (broadcast_buffers=True).",
        "parameters": f"The models differ {wrapped}: check which checkpoint, and how much of it, "
        f"{name_ranks(ranks)} loaded, and what is drawn at random while the model is built.",
    }
    return CheckResult(Status.ERROR, found, advice[name], numbers, ranks)


_UNSEEDED = (
    "DDP copies rank 0's model to all when it wraps it; FSDP and loops of your own do not. "
    "Seed all ranks alike before the model is built, and differently after it."
)


def _optimizers(facts: Sequence[Facts]) -> CheckResult:
    optimizers = [fact["optimizer"] or {} for fact in facts]
    if not any(optimizers):
        found = "give --optimizer, or let the model's function return (module, optimizer)"
        return CheckResult(Status.SKIPPED, found)
    settings = [optimizer.get("settings", {}) for optimizer in optimizers]
    names = list(dict.fromkeys(name for one in settings for name in one))
    odd = {name: minority_ranks([repr(one.get(name)) for one in settings]) for name in names}
    different = {name: [one.get(name) for one in settings] for name in names if odd[name]}
    if different:
        parts = [_values_in_words(name, values) for name, values in different.items()]
        return CheckResult(
            Status.ERROR,
            first_of(parts, between="; "),
            "Ranks that step differently drift apart although their gradients are equal: give all "
            "of them the same settings.",
            {"different": different},
            tuple(sorted({rank for ranks in odd.values() for rank in ranks})),
        )
    tables: list[Table] = [optimizer.get("state", {}) for optimizer in optimizers]
    differing = _differing(tables) if len({tuple(table) for table in tables}) == 1 else ["its size"]
    if differing:
        ranks = minority_ranks([repr(table) for table in tables])
        return CheckResult(
            Status.ERROR,
            f"what the optimizer remembers differs on {name_ranks(ranks)}, in "
            f"{first_of(differing)}",
            f"Check which optimizer state {name_ranks(ranks)} loaded.",
            {"different": differing},
            ranks,
        )
    first = settings[0]
    found = f"{first['class']}, learning rate {first.get('group 0: lr')}, {len(names)} settings"
    return CheckResult(Status.OK, found, numbers={"settings": first})


def _random_numbers(facts: Sequence[Facts]) -> CheckResult:
    states = {name: [fact["rng"].get(name) for fact in facts] for name in facts[0]["rng"]}
    shared = {
        name: [rank for rank, value in enumerate(values) if values.count(value) > 1]
        for name, values in states.items()
    }
    dropout = [str(name) for name in facts[0]["dropout"]]
    numbers = {"sharing": shared, "dropout": dropout}
    if len(facts) == 1:
        return ALONE
    generator = "device" if "device" in shared else "torch"
    if shared[generator] and dropout:
        return CheckResult(
            Status.NOTE,
            f"{name_ranks(shared[generator])} have the same state of torch's generator after the "
            "model is built, and drop the same units in modules with dropout: "
            f"{len(dropout)} ({first_of(dropout)})",
            "Nothing for dropout alone. If the model learns from noise or masks, seed the ranks "
            "differently after it is built: torch.manual_seed(seed + rank).",
            numbers,
            tuple(shared[generator]),
        )
    alike = [name for name, ranks in shared.items() if ranks]
    if not alike:
        return CheckResult(Status.OK, "different on all ranks", numbers=numbers)
    found = (
        f"equal on ranks: the generators of {', '.join(alike)}; that is usual where one seed is "
        "set for the model"
    )
    found += f"; those of {generator} differ, as dropout needs" if dropout else ", no dropout seen"
    advice = (
        "If noise or augmentation is drawn from them while training, seed them differently after "
        "the model is built."
    )
    return CheckResult(Status.OK, found, advice, numbers)


def _batch_norms(facts: Sequence[Facts]) -> CheckResult | None:
    names = [str(name) for name in facts[0]["batch_norms"]]
    if not names or len(facts) == 1:
        return None
    modules = count(len(names), "module")
    found = f"{modules} with statistics of each rank's own batch: {first_of(names)}"
    advice = (
        "Small batches per rank make them noisy: torch.nn.SyncBatchNorm.convert_sync_batchnorm "
        "takes them over all ranks."
    )
    return CheckResult(Status.NOTE, found, advice, {"modules": names})


def _other_layout(name: str, what: str, tables: Sequence[Table]) -> CheckResult | None:
    """Return the result when ranks have other names, shapes or types."""
    layouts = [tuple((key, repr(value[:2])) for key, value in table.items()) for table in tables]
    odd = minority_ranks(layouts)
    if not odd:
        return None
    usual = next((r for r in range(len(tables)) if r not in odd), 0)
    others = [rank for rank in odd if layouts[rank] != layouts[usual]]
    differing = sorted({key for key, _ in set(layouts[usual]) ^ set(layouts[others[0]])})
    differing = differing or ["their order"]
    return CheckResult(
        Status.ERROR,
        f"{name_ranks(others)} built another model: names, shapes or types of {what}s are not "
        f"those of rank {usual} in {first_of(differing)}",
        "Ranks would add up gradients that do not belong together: build the same model on all.",
        {"different": differing},
        odd,
    )


def _differing(tables: Sequence[Table]) -> list[str]:
    return [key for key in tables[0] if len({repr(table[key][2]) for table in tables}) > 1]


def _looks_unseeded(tables: Sequence[Table], different: Sequence[str]) -> bool:
    """Return whether all matrices differ between all ranks, as those drawn at random do."""
    matrices = [
        key for key, value in tables[0].items() if value[2] is not None and len(value[0]) > 1
    ]
    distinct = all(len({table[key][2] for table in tables}) == len(tables) for key in matrices)
    return bool(matrices) and distinct and set(matrices) <= set(different)


def _equal(name: str, what: str, tables: Sequence[Table], numbers: dict[str, Any]) -> CheckResult:
    split = sum(value[2] is None for value in tables[0].values())
    compared = len(tables[0]) - split
    if not tables[0]:
        return CheckResult(Status.OK, f"the model has no {what}s")
    left_out = (
        f"{count(split, what)} not compared: each rank holds a part, or there is no content yet"
    )
    if not compared:
        return CheckResult(Status.SKIPPED, left_out, numbers=numbers)
    bits = "the same bits on all ranks" if len(tables) > 1 else "one rank"
    found = f"{count(compared, what)}, {bits}" + (f"; {left_out}" if split else "")
    return CheckResult(Status.OK, found, numbers=numbers)


def _values_in_words(name: str, values: Sequence[Any]) -> str:
    words = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    groups = ranks_by(["missing" if word == "None" else word for word in words])
    parts = [f"{word} on {name_ranks(ranks)}" for word, ranks in groups.items()]
    return f"{name}: {', '.join(parts[:3])}"


STAGE = PreflightStage(
    "model",
    look,
    {
        "parameters": partial(_tensors, "parameters"),
        "buffers": partial(_tensors, "buffers"),
        "optimizer": _optimizers,
        "random_numbers": _random_numbers,
        "batch_norm": _batch_norms,
    },
    advice=FUNCTION_ADVICE,
)
