"""Whether ranks read different data, equally much of it, and in a new order each epoch."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch import Tensor

from rankscope.bus.replicas import minority_ranks
from rankscope.bus.words import count, name_ranks
from rankscope.errors import UsageError
from rankscope.stats.samples import LIKELY, SURE
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.tools.doctor.stage import (
    ALONE,
    FUNCTION_ADVICE,
    Bench,
    CheckResult,
    Facts,
    PreflightStage,
    Status,
)
from rankscope.wrappers.datasets import draws_with_replacement, settings_of
from rankscope.wrappers.samples import digest_inputs

SHARE_OF_TIME = 0.5  # share of a stage's time that reading the first epoch may take
SAMPLES_IN_ALL = 1 << 20  # samples over all ranks that are compared
ORDER_BATCHES = 20  # batches by which the order of two epochs is compared
FEW = 2
ALIKE = 20  # different samples, and draws for each one, up to and from which samples look alike

_LABELS = ("labels", "label", "targets", "target")
_SAMPLER_FACTS = ("num_replicas", "rank", "seed", "shuffle", "drop_last")


def look(bench: Bench) -> Facts:
    """Read an epoch up to the limit, and the beginnings of further ones."""
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
    """Set the epoch of a loader, its sampler or its data set; return the function, if any."""
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
    """Return whether one rank's samples have hardly any different digests, as labels do."""
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
    name = type(sampler).__name__ if sampler is not None else ""
    return {"class": name, **settings_of(sampler, _SAMPLER_FACTS)}


def samples_of(batch: Any) -> list[int] | None:
    """Return one digest per sample of a batch, as in a run; None if samples cannot be separated."""
    digests = digest_inputs((batch,), {})
    return None if digests is None else digests.tolist()


def label_tokens_of(batch: Any) -> int | None:
    """Return the label tokens of a batch, of a name like ``labels`` or a pair; None without."""
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() == 0:
        return None
    return int((labels != IGNORED_LABEL).sum())


UNEVEN = 1.1
VERY_UNEVEN = 4.0
TILTED = 1.5
"""Factors between label tokens: of a step for a note and a warning, of the whole for a warning."""
SAME_SHARE = 0.5  # of the steps in which two ranks have one batch: they read the same data


@dataclass(frozen=True, slots=True)
class Overlap:
    """The samples that ranks drew together.

    ``repeats`` are draws of a sample that had been drawn before, ``own_repeats`` those of them
    whose rank had drawn it itself; ``padding`` are repeats at the epoch's end, fewer than ranks,
    and not among them. ``chance`` is the probability of so few own repeats if data only hold some
    content several times, or ranks draw with replacement: each repeat then hits its own rank with
    1/W at least. ``same_batches`` are groups of ranks that read the same batches; ``ranks`` drew
    samples that another rank had drawn.
    """

    drawn: int
    distinct: int
    repeats: int
    own_repeats: int
    padding: int
    chance: float
    same_batches: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def _shards(facts: Sequence[Facts]) -> CheckResult:
    if len(facts) == 1:
        return ALONE
    declared = _declared(facts)
    if declared:
        return declared
    unread = [fact for fact in facts if not fact["recognised"]]
    if unread:
        kind = unread[0]["kind"]
        article = "an" if kind[:1] in "AEIOUaeiou" else "a"
        return CheckResult(
            Status.SKIPPED,
            f"the samples of a batch could not be told apart (it is {article} {kind})",
            "Batches of tensors, of text, or tuples and mappings of these are understood.",
        )
    if not any(fact["tokens"] for fact in facts):
        found = "no rank got a batch"
        return CheckResult(Status.ERROR, found, "Check what the loader reads.")
    ended = all(fact["ended"] for fact in facts)
    overlap = compare([fact["samples"] for fact in facts], ended=ended)
    meant = all(fact["with_replacement"] for fact in facts)
    return _judge_overlap(overlap, whole_epoch=ended, meant=meant)


def _declared(facts: Sequence[Facts]) -> CheckResult | None:
    """Return the error in the samplers' own settings, whatever the samples."""
    samplers = [fact["sampler"] for fact in facts]
    ranks = [sampler.get("rank") for sampler in samplers]
    replicas = [sampler.get("num_replicas") for sampler in samplers]
    seeds = [str(sampler.get("seed")) for sampler in samplers]
    numbers = {"samplers": samplers}
    if None in ranks or None in replicas:
        return None
    found = ""
    odd: tuple[int, ...] = ()
    if set(replicas) != {len(facts)}:
        odd = tuple(r for r, number in enumerate(replicas) if number != len(facts))
        dealt = " and ".join(map(str, sorted({replicas[rank] for rank in odd})))
        found = (
            f"the sampler of {name_ranks(odd)} deals to {dealt} ranks, and there are {len(facts)}"
        )
    elif len(set(ranks)) < len(ranks):
        odd = tuple(r for r, number in enumerate(ranks) if ranks.count(number) > 1)
        found = f"the samplers of {name_ranks(odd)} take the same shard"
    elif minority_ranks(seeds) and any(sampler.get("shuffle", True) for sampler in samplers):
        odd = minority_ranks(seeds)
        first = ", ".join(seeds[:8])
        found = f"samplers shuffle with different seeds ({first}), so their shards overlap"
    if not found:
        return None
    advice = (
        "Give every rank's sampler the same seed, the number of ranks, and the rank's own number."
    )
    return CheckResult(Status.ERROR, found, advice, numbers, odd)


def _judge_overlap(overlap: Overlap, *, whole_epoch: bool, meant: bool) -> CheckResult:
    read = (
        f"{overlap.distinct:,} different samples of {overlap.drawn:,} read"
        f"{'' if whole_epoch else ', a part of the epoch'}"
    )
    numbers = asdict(overlap)
    ranks = numbers.pop("ranks")
    if overlap.same_batches:
        groups = ", and ".join(name_ranks(group) for group in overlap.same_batches)
        return CheckResult(
            Status.ERROR,
            f"{groups} read the same batches; {read}",
            "Give each rank its own shard: a DistributedSampler in the data loader, or, for "
            "an iterable data set, a split by rank inside it.",
            numbers,
            tuple(sorted({rank for group in overlap.same_batches for rank in group})),
        )
    if meant:
        shared = f"{read}; the loaders draw with replacement, so ranks share samples on purpose"
        return CheckResult(Status.OK, shared, numbers=numbers)
    if overlap.chance < LIKELY:
        crossing = count(overlap.repeats - overlap.own_repeats, "sample")
        return CheckResult(
            Status.ERROR if overlap.chance < SURE else Status.WARNING,
            f"ranks draw each other's samples: {crossing} came on more than one rank; {read}",
            "Shuffle with the same seed on all ranks and shard after the shuffle.",
            numbers,
            ranks,
        )
    if overlap.padding:
        found = (
            f"{read}; {count(overlap.padding, 'sample')} at the epoch's end drawn again, so that "
            "all ranks have equally many"
        )
        advice = "Harmless; drop_last=True in the sampler avoids it."
        return CheckResult(Status.NOTE, found, advice, numbers)
    shared = (
        f"{count(overlap.repeats, 'repeat')}, no more between ranks than within them"
        if overlap.repeats
        else "none on two ranks"
    )
    return CheckResult(Status.OK, f"{read}, {shared}", numbers=numbers)


def _counts(facts: Sequence[Facts]) -> CheckResult:
    lengths = [fact["length"] for fact in facts]
    read = [len(fact["tokens"]) for fact in facts]
    numbers = {"read": read, "lengths": lengths}
    if None not in lengths and len(set(lengths)) > 1:
        return _uneven(lengths, minority_ranks(lengths), numbers)
    ends = [number for number, fact in zip(read, facts, strict=True) if fact["ended"]]
    short = [r for r, fact in enumerate(facts) if fact["ended"] and read[r] < max(read)]
    if ends and short:
        return _uneven(read, tuple(short), numbers)
    if ends:
        found = f"{count(min(ends), 'batch', 'batches')} on each rank"
    elif None not in lengths:
        found = f"{count(lengths[0], 'batch', 'batches')} on each rank, {min(read):,} of them read"
    else:
        found = f"at least {count(min(read), 'batch', 'batches')} on each rank"
    return CheckResult(Status.OK, found, numbers=numbers)


def _uneven(numbers_W: Sequence[int], odd: tuple[int, ...], numbers: dict[str, Any]) -> CheckResult:
    fewest = min(numbers_W)
    most = max(numbers_W)
    least = [rank for rank, number in enumerate(numbers_W) if number == fewest]
    return CheckResult(
        Status.ERROR,
        f"{name_ranks(least)} {'has' if len(least) == 1 else 'have'} "
        f"{count(fewest, 'batch', 'batches')}, others up to {most:,}",
        "Under DDP the epoch's end hangs: some ranks wait for a gradient that never comes. Use a "
        "sampler that deals evenly, stop after the same number of steps on all ranks, or train "
        "inside torch's Join.",
        numbers,
        odd,
    )


def _weighting(facts: Sequence[Facts]) -> CheckResult:
    steps = min(len(fact["tokens"]) for fact in facts)
    tokens = [fact["tokens"][:steps] for fact in facts]
    if len(facts) == 1:
        return ALONE
    if not steps or any(number is None for rank in tokens for number in rank):
        found = "no label tokens were recognised in the batches (whole numbers under 'labels')"
        return CheckResult(Status.SKIPPED, found)
    columns = list(zip(*tokens, strict=True))
    factors = [max(column) / max(min(column), 1) for column in columns]
    totals = [sum(rank) for rank in tokens]
    tilt = max(totals) / max(min(totals), 1)
    usual = median(factors)
    largest = max(factors)
    numbers = {"median_factor": usual, "largest_factor": largest, "tokens": totals, "steps": steps}
    empty = sum(min(column) == 0 < max(column) for column in columns)
    if usual < UNEVEN and tilt < TILTED and not empty:
        found = f"{count(min(totals), 'label token')} or more on each rank, alike in each step"
        return CheckResult(Status.OK, found, numbers=numbers)
    grave = usual >= VERY_UNEVEN or tilt >= TILTED
    found = (
        f"ranks differ in label tokens per step, × {usual:.2g} typically and × {largest:.2g} at "
        "most: averaged over ranks, a token counts that much more on the rank with fewer"
    )
    if tilt >= TILTED:
        least = totals.index(min(totals))
        found += f"; rank {least} has {min(totals):,} in all, others up to {max(totals):,}"
    if empty:
        found += f"; in {count(empty, 'step')} a rank has none"
    return CheckResult(
        Status.WARNING if grave else Status.NOTE,
        found,
        "If the loss is a mean over each rank's own tokens, multiply it by W × own tokens / tokens "
        "of all ranks, so that each token counts the same.",
        numbers,
        (totals.index(min(totals)),) if tilt >= TILTED else (),
    )


def _order(facts: Sequence[Facts]) -> CheckResult:
    if any(not fact["recognised"] or not fact["tokens"] for fact in facts):
        return CheckResult(Status.SKIPPED, "samples were not recognised")
    if any(fact["one_pass"] for fact in facts):
        found = "the loader can be read once only, so there is no second epoch"
        return CheckResult(Status.OK, found)
    how = str(facts[0]["set_epoch"])
    still = [rank for rank, fact in enumerate(facts) if not fact["changes_alone"]]
    fixed = [rank for rank in still if not facts[rank]["changes_after_set_epoch"]]
    sampler = str(facts[0]["sampler"]["class"])
    numbers = {"set_epoch": how, "sampler": sampler, "same_order": still}
    if not still:
        return CheckResult(Status.OK, "it changes by itself", numbers=numbers)
    if not fixed:
        found = f"it changes when {how}(epoch) is called, and not without"
        advice = f"Make sure that the training calls {how}(epoch) before each epoch."
        return CheckResult(Status.NOTE, found, advice, numbers)
    meant = facts[fixed[0]]["sampler"].get("shuffle") is False or sampler == "SequentialSampler"
    called = f", also after {how}(1)" if how else ""
    who = "" if len(fixed) == len(facts) else f" on {name_ranks(fixed)}"
    return CheckResult(
        Status.NOTE if meant else Status.WARNING,
        f"two epochs begin with the same batches{who}{called}" + ("; shuffling is off" * meant),
        "Shuffle anew in each epoch, unless the order is meant.",
        numbers,
        tuple(fixed),
    )


def compare(samples: Sequence[Sequence[Sequence[int]]], *, ended: bool) -> Overlap:
    """Compare digests of samples by rank, batch and sample; ``ended``: all read a whole epoch."""
    num_ranks = len(samples)
    steps = max(map(len, samples), default=0)
    seen: dict[int, set[int]] = {}
    repeats = own = padding = 0
    ranks: set[int] = set()
    for step in range(steps):
        again: list[tuple[int, int]] = []
        for rank, batches in enumerate(samples):
            for digest in batches[step] if step < len(batches) else ():
                if digest in seen:
                    again.append((rank, digest))
                    own += rank in seen[digest]
                seen.setdefault(digest, set()).add(rank)
        if ended and step == steps - 1 and len(again) < num_ranks and not repeats:
            padding = len(again)
            own = 0
        else:
            repeats += len(again)
            ranks |= {member for _, digest in again for member in seen[digest]}
    return Overlap(
        drawn=sum(len(batch) for batches in samples for batch in batches),
        distinct=len(seen),
        repeats=repeats,
        own_repeats=own,
        padding=padding,
        chance=chance_of_few(own, repeats, 1 / num_ranks),
        same_batches=_same_batches(samples),
        ranks=tuple(sorted(ranks)),
    )


def chance_of_few(hits: int, trials: int, probability: float) -> float:
    """Return the probability of at most so many hits, of a binomial distribution."""
    if not trials or probability >= 1:
        return 1.0
    terms = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(probability)
        + (trials - k) * math.log1p(-probability)
        for k in range(hits + 1)
    )
    return min(1.0, math.fsum(map(math.exp, terms)))


def _same_batches(samples: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks that have the same batch in most steps, whatever its inner order."""
    keys = [[hash(tuple(sorted(batch))) for batch in batches] for batches in samples]
    groups: list[list[int]] = []
    for rank, mine in enumerate(keys):
        for group in groups:
            theirs = keys[group[0]]
            shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
            if mine and shared >= SAME_SHARE * max(len(mine), len(theirs)):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(tuple(group) for group in groups if len(group) > 1)


STAGE = PreflightStage(
    "loader",
    look,
    {
        "shards": _shards,
        "batch_counts": _counts,
        "loss_weighting": _weighting,
        "epoch_order": _order,
    },
    advice=FUNCTION_ADVICE,
)
