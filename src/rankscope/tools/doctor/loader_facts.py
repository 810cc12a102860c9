"""Reads one rank's data loader: its samples, their number, and their order."""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UsageError
from rankscope.evidence.environment.training import draws_with_replacement
from rankscope.evidence.samples.probe import digest_inputs
from rankscope.tools.doctor.stage import Bench, Facts
from rankscope.wrappers.labels import IGNORED_LABEL

SHARE_OF_TIME = 0.5
"""Share of a stage's time that reading the first epoch may take."""
SAMPLES_IN_ALL = 1 << 20
"""Samples over all ranks that are compared."""
ORDER_BATCHES = 20
"""Batches by which the order of two epochs is compared."""
FEW = 2
ALIKE = 20
"""Different samples, and draws for each one, up to and from which samples look alike."""

_LABELS = ("labels", "label", "targets", "target")
_SAMPLER_FACTS = ("num_replicas", "rank", "seed", "shuffle", "drop_last")


def look(bench: Bench) -> Facts:
    """Read an epoch up to the limit, and the beginnings of further ones.

    Raises:
        UsageError: The function returns nothing that can be iterated.
    """
    loader = bench.functions["loader"]()
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            "--loader expected a function that returns a data loader or another iterable of "
            f"batches; it returned {type(loader).__name__}"
        )
    setter = set_epoch(loader, 0)
    limit = max(256, SAMPLES_IN_ALL // bench.place.num_ranks)
    first, bench.batch = _read(
        loader, bench.options.batches, limit, SHARE_OF_TIME * bench.options.seconds
    )
    order = first["samples"][:ORDER_BATCHES]
    again = _beginning(loader, len(order))
    facts = {
        **first,
        "length": _length(loader),
        "set_epoch": setter,
        "one_pass": again is None,
        "changes_alone": again is not None and again != order,
        "changes_after_set_epoch": None,
        "sampler": _sampler_facts(loader),
        "with_replacement": draws_with_replacement(loader),
    }
    if setter and again == order:
        set_epoch(loader, 1)
        facts["changes_after_set_epoch"] = _beginning(loader, len(order)) != order
    return facts


def set_epoch(loader: Any, epoch: int) -> str:
    """Set the epoch of a loader, its sampler or its data set.

    Returns:
        The function that was called, such as ``sampler.set_epoch``; empty when there is none.
    """
    for path in ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
        owner = loader
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part, None)
        call = getattr(owner, "set_epoch", None)
        if callable(call):
            call(epoch)
            return f"{path or 'loader'}.set_epoch"
    return ""


def _read(loader: Any, most: int, most_samples: int, seconds: float) -> tuple[dict[str, Any], Any]:
    """Read batches up to the limits; return their contents, and the first of them or None."""
    until = time.monotonic() + seconds
    samples: list[list[int]] = []
    tokens: list[int | None] = []
    recognised = True
    ended = False
    drawn = 0
    first = None
    batches = iter(loader)
    while len(tokens) < most and time.monotonic() < until and drawn < most_samples:
        try:
            batch = next(batches)
        except StopIteration:
            ended = True
            break
        first = batch if first is None else first
        found = samples_of(batch)
        recognised = recognised and found is not None
        samples.append(found or [])
        drawn += len(found or [])
        tokens.append(label_tokens_of(batch))
    kind = "" if recognised else type(batch).__name__
    if recognised and _look_alike(samples):
        recognised = False
        distinct = len({sample for found in samples for sample in found})
        kind = f"{type(first).__name__} with {distinct:,} different samples of {drawn:,}"
    facts = {
        "samples": samples if recognised else [],
        "recognised": recognised,
        "kind": kind,
        "tokens": tokens,
        "ended": ended or _length(loader) == len(tokens),
    }
    return facts, first


def _look_alike(samples: list[list[int]]) -> bool:
    """Return whether one rank's samples have hardly any different digests, as labels do.

    The same few samples in batch after batch are no such case.
    """
    drawn = [sample for batch in samples for sample in batch]
    distinct = len(set(drawn))
    if distinct > max(FEW, len(drawn) // ALIKE) or len(drawn) < 2 * (distinct + 1):
        return False
    several = [batch for batch in samples if len(batch) > 1]
    repeating = sum(len(set(batch)) < len(batch) for batch in several)
    return 2 * repeating >= len(several)


def _beginning(loader: Any, number: int) -> list[list[int]] | None:
    """Return the samples of an epoch's first batches; None when there is no further epoch."""
    found: list[list[int]] = []
    for batch in loader:
        found.append(samples_of(batch) or [])
        if len(found) >= max(number, 1):
            break
    return found[:number] if found else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _sampler_facts(loader: Any) -> dict[str, Any]:
    sampler = getattr(loader, "sampler", None)
    facts: dict[str, Any] = {"class": type(sampler).__name__ if sampler is not None else ""}
    for name in _SAMPLER_FACTS:
        value = getattr(sampler, name, None)
        if isinstance(value, bool | int):
            facts[name] = value
    return facts


def samples_of(batch: Any) -> list[int] | None:
    """Return one digest per sample of a batch, or None when samples cannot be separated.

    Tensors are digested by content, text and numbers by value. Of a tuple or a mapping the largest
    part counts, among those of as many samples as the first one: labels are the same for many
    samples. In a mapping, a part named as label or mask counts only if nothing else is there.
    """
    found = _recognised(batch)
    return None if found is None else found[0]


def _recognised(batch: Any) -> tuple[list[int], float] | None:
    """Return one digest per sample, and how many numbers each is made of: without end for text."""
    named = batch if isinstance(batch, Mapping) else {}
    if isinstance(named.get("input_ids"), Tensor):
        samples = _listed(digest_inputs((batch,), {}))
        return (samples, math.inf) if samples else None
    if isinstance(batch, Tensor):
        samples = _listed(digest_inputs((batch,), {}))
        return (samples, batch.numel() / len(samples)) if samples else None
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Sequence) and batch and all(isinstance(x, str | bytes) for x in batch):
        return [_digest(text) for text in batch], math.inf
    if isinstance(batch, Mapping):
        plain = [part for name, part in batch.items() if not _is_label_or_mask(name)]
        return _largest(plain) or _largest(list(batch.values()))
    return _largest(batch) if isinstance(batch, Sequence) else None


def _largest(parts: Sequence[Any]) -> tuple[list[int], float] | None:
    found = [part for part in map(_recognised, parts) if part is not None]
    alike = [part for part in found if len(part[0]) == len(found[0][0])]
    return max(alike, key=lambda part: part[1], default=None)


def _is_label_or_mask(name: Any) -> bool:
    return isinstance(name, str) and (name.lower() in _LABELS or "mask" in name.lower())


def label_tokens_of(batch: Any) -> int | None:
    """Return the number of label tokens of a batch, or None without labels.

    Labels stand under ``labels`` or a like name, or in the second place of a pair; whole numbers
    count unless they are −100.
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() == 0:
        return None
    return int((labels != IGNORED_LABEL).sum())


def _listed(digests: Tensor | None) -> list[int] | None:
    if digests is None:
        return None
    values: list[int] = digests.to(torch.int64).cpu().tolist()
    return values


def _digest(text: str | bytes) -> int:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
