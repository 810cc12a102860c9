"""Whether ranks read different data, equally much of it, and in a new order each epoch."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rankscope.diagnose.rules import count, name_ranks
from rankscope.doctor.loader_facts import look
from rankscope.doctor.overlap import Overlap, compare
from rankscope.doctor.result import CheckResult, Facts, Status, unlike_most
from rankscope.doctor.stage import Stage

SHARDS, COUNTS, WEIGHTING, ORDER = "shards", "batch_counts", "loss_weighting", "epoch_order"
TITLES = {
    SHARDS: "Shards",
    COUNTS: "Batch counts",
    WEIGHTING: "Loss weighting",
    ORDER: "Epoch order",
}

SURE, LIKELY = 1e-6, 1e-4
"""Probabilities of an innocent reading below which an overlap is an error, or a warning."""
UNEVEN, VERY_UNEVEN, TILTED = 1.1, 4.0, 1.5
"""Factors between label tokens: of a step for a note and a warning, of the whole for a warning."""


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Compare what the ranks have read."""
    return [_shards(facts), _counts(facts), _weighting(facts), _order(facts)]


def _shards(facts: Sequence[Facts]) -> CheckResult:
    title = TITLES[SHARDS]
    if len(facts) == 1:
        return CheckResult(SHARDS, title, Status.SKIPPED, "one rank has nobody to compare with")
    declared = _declared(facts)
    if declared:
        return declared
    unread = [fact for fact in facts if not fact["recognised"]]
    if unread:
        return CheckResult(
            SHARDS,
            title,
            Status.SKIPPED,
            f"the samples of a batch could not be told apart (it is a {unread[0]['kind']})",
            "Batches of tensors, of text, or tuples and mappings of these are understood.",
        )
    if not any(fact["tokens"] for fact in facts):
        found = "no rank got a batch"
        return CheckResult(SHARDS, title, Status.ERROR, found, "Check what the loader reads.")
    ended = all(fact["ended"] for fact in facts)
    overlap = compare([fact["samples"] for fact in facts], ended=ended)
    meant = all(fact["with_replacement"] for fact in facts)
    return _judge_overlap(overlap, whole_epoch=ended, meant=meant)


def _declared(facts: Sequence[Facts]) -> CheckResult | None:
    """Return what is wrong with what the samplers themselves say, whatever was drawn."""
    samplers = [fact["sampler"] for fact in facts]
    ranks = [sampler.get("rank") for sampler in samplers]
    replicas = [sampler.get("num_replicas") for sampler in samplers]
    seeds = [sampler.get("seed") for sampler in samplers]
    numbers = {"samplers": samplers}
    if None in ranks or None in replicas:
        return None
    found = ""
    odd: tuple[int, ...] = ()
    if set(replicas) != {len(facts)}:
        odd = tuple(r for r, number in enumerate(replicas) if number != len(facts))
        said = " and ".join(map(str, sorted({replicas[rank] for rank in odd})))
        found = (
            f"the sampler of {name_ranks(odd)} deals to {said} ranks, and there are {len(facts)}"
        )
    elif len(set(ranks)) < len(ranks):
        odd = tuple(r for r, number in enumerate(ranks) if ranks.count(number) > 1)
        found = f"the samplers of {name_ranks(odd)} take the same shard"
    elif unlike_most(seeds) and any(sampler.get("shuffle", True) for sampler in samplers):
        odd = unlike_most(seeds)
        told = ", ".join(map(str, seeds[:8]))
        found = f"samplers shuffle with different seeds ({told}), so their shards overlap"
    if not found:
        return None
    advice = (
        "Give every rank's sampler the same seed, the number of ranks, and the rank's own number."
    )
    return CheckResult(SHARDS, TITLES[SHARDS], Status.ERROR, found, advice, numbers, odd)


def _judge_overlap(overlap: Overlap, *, whole_epoch: bool, meant: bool) -> CheckResult:
    title = TITLES[SHARDS]
    read = (
        f"{overlap.distinct:,} different samples of {overlap.drawn:,} read"
        f"{'' if whole_epoch else ', a part of the epoch'}"
    )
    numbers = {
        "drawn": overlap.drawn,
        "distinct": overlap.distinct,
        "repeats": overlap.repeats,
        "own_repeats": overlap.own,
        "padding": overlap.padding,
        "chance": overlap.chance,
        "same_batches": [list(group) for group in overlap.same_batches],
    }
    if overlap.same_batches:
        groups = ", and ".join(name_ranks(group) for group in overlap.same_batches)
        return CheckResult(
            SHARDS,
            title,
            Status.ERROR,
            f"{groups} read the same batches; {read}",
            "Give each rank a shard of its own: a DistributedSampler in the data loader, or, for "
            "an iterable data set, a split by rank inside it.",
            numbers,
            tuple(sorted({rank for group in overlap.same_batches for rank in group})),
        )
    if meant:
        shared = f"{read}; the loaders draw with replacement, so ranks share samples on purpose"
        return CheckResult(SHARDS, title, Status.OK, shared, numbers=numbers)
    if overlap.chance < LIKELY:
        sure = overlap.chance < SURE
        return CheckResult(
            SHARDS,
            title,
            Status.ERROR if sure else Status.WARNING,
            f"ranks draw each other's samples: {count(overlap.repeats - overlap.own, 'sample')} "
            f"came on more than one rank; {read}",
            "Shuffle with the same seed on all ranks and shard after the shuffle.",
            numbers,
            overlap.ranks,
        )
    if overlap.padding:
        found = (
            f"{read}; {count(overlap.padding, 'sample')} at the epoch's end drawn again, so that "
            "all ranks have equally many"
        )
        advice = "Harmless; drop_last=True in the sampler avoids it."
        return CheckResult(SHARDS, title, Status.NOTE, found, advice, numbers)
    shared = (
        f"{count(overlap.repeats, 'repeat')}, no more between ranks than within them"
        if overlap.repeats
        else "none on two ranks"
    )
    return CheckResult(SHARDS, title, Status.OK, f"{read}, {shared}", numbers=numbers)


def _counts(facts: Sequence[Facts]) -> CheckResult:
    title = TITLES[COUNTS]
    lengths = [fact["length"] for fact in facts]
    read = [len(fact["tokens"]) for fact in facts]
    numbers = {"read": read, "lengths": lengths}
    if None not in lengths and len(set(lengths)) > 1:
        return _uneven(lengths, unlike_most(lengths), numbers)
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
    return CheckResult(COUNTS, title, Status.OK, found, numbers=numbers)


def _uneven(numbers_W: Sequence[int], odd: tuple[int, ...], numbers: dict[str, Any]) -> CheckResult:
    fewest, most = min(numbers_W), max(numbers_W)
    least = [rank for rank, number in enumerate(numbers_W) if number == fewest]
    return CheckResult(
        COUNTS,
        TITLES[COUNTS],
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
    title = TITLES[WEIGHTING]
    steps = min(len(fact["tokens"]) for fact in facts)
    tokens = [fact["tokens"][:steps] for fact in facts]
    if len(facts) == 1:
        return CheckResult(WEIGHTING, title, Status.SKIPPED, "one rank has nobody to compare with")
    if not steps or any(number is None for rank in tokens for number in rank):
        found = "no label tokens were recognised in the batches (whole numbers under 'labels')"
        return CheckResult(WEIGHTING, title, Status.SKIPPED, found)
    columns = list(zip(*tokens, strict=True))
    factors = [max(column) / max(min(column), 1) for column in columns]
    totals = [sum(rank) for rank in tokens]
    tilt = max(totals) / max(min(totals), 1)
    usual, largest = median(factors), max(factors)
    numbers = {"median_factor": usual, "largest_factor": largest, "tokens": totals, "steps": steps}
    empty = sum(min(column) == 0 < max(column) for column in columns)
    if usual < UNEVEN and tilt < TILTED and not empty:
        found = f"{count(min(totals), 'label token')} or more on each rank, alike in each step"
        return CheckResult(WEIGHTING, title, Status.OK, found, numbers=numbers)
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
        WEIGHTING,
        title,
        Status.WARNING if grave else Status.NOTE,
        found,
        "If the loss is a mean over each rank's own tokens, multiply it by W × own tokens / tokens "
        "of all ranks, so that each token counts the same.",
        numbers,
        (totals.index(min(totals)),) if tilt >= TILTED else (),
    )


def _order(facts: Sequence[Facts]) -> CheckResult:
    title = TITLES[ORDER]
    if any(not fact["recognised"] or not fact["tokens"] for fact in facts):
        return CheckResult(ORDER, title, Status.SKIPPED, "samples were not recognised")
    if any(fact["one_pass"] for fact in facts):
        found = "the loader can be read once only, so there is no second epoch"
        return CheckResult(ORDER, title, Status.OK, found)
    how = str(facts[0]["set_epoch"])
    still = [rank for rank, fact in enumerate(facts) if not fact["changes_alone"]]
    fixed = [rank for rank in still if not facts[rank]["changes_when_told"]]
    sampler = str(facts[0]["sampler"]["class"])
    numbers = {"set_epoch": how, "sampler": sampler, "same_order": still}
    if not still:
        return CheckResult(ORDER, title, Status.OK, "it changes by itself", numbers=numbers)
    if not fixed:
        found = f"it changes when {how}(epoch) is called, and not without"
        advice = f"Make sure that the training calls {how}(epoch) before each epoch."
        return CheckResult(ORDER, title, Status.NOTE, found, advice, numbers)
    meant = facts[fixed[0]]["sampler"].get("shuffle") is False or sampler == "SequentialSampler"
    told = f", also after {how}(1)" if how else ""
    who = "" if len(fixed) == len(facts) else f" on {name_ranks(fixed)}"
    return CheckResult(
        ORDER,
        title,
        Status.NOTE if meant else Status.WARNING,
        f"two epochs begin with the same batches{who}{told}" + ("; shuffling is off" * meant),
        "Shuffle anew in each epoch, unless the order is meant.",
        numbers,
        tuple(fixed),
    )


STAGE = Stage(
    "loader",
    "Data",
    look,
    judge,
    advice="The function must work on each rank as in the training. The process group exists "
    "already: leave init_process_group out of it.",
)
