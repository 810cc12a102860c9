"""Whether all ranks start from the same model and optimizer, with random numbers of their own."""

from collections.abc import Sequence
from typing import Any

from rankscope.diagnose.rules import count, name_ranks
from rankscope.doctor.model_facts import look
from rankscope.doctor.result import CheckResult, Facts, Status, unlike_most
from rankscope.doctor.stage import Stage

PARAMETERS, BUFFERS, OPTIMIZER = "parameters", "buffers", "optimizer"
RNG, BATCH_NORM = "random_numbers", "batch_norm"
TITLES = {
    PARAMETERS: "Parameters",
    BUFFERS: "Buffers",
    OPTIMIZER: "Optimizer",
    RNG: "Random numbers",
    BATCH_NORM: "Batch normalisation",
}

_SHOWN = 3


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Compare models, optimizers and random generators between ranks."""
    results = [
        _parameters(facts),
        _buffers(facts),
        _optimizers(facts),
        _random_numbers(facts),
    ]
    return [*results, *_batch_norms(facts)]


def _parameters(facts: Sequence[Facts]) -> CheckResult:
    tables = [fact["parameters"] for fact in facts]
    other = _other_layout(PARAMETERS, "parameter", tables)
    if other:
        return other
    different = _differing(tables)
    numbers = _numbers(tables, different)
    if not different:
        return _equal(PARAMETERS, "parameter", tables, numbers)
    ranks = _odd_ranks(tables, different)
    found = _told(different, ranks, len(facts), "parameter", len(tables[0]))
    if not facts[0]["wrapped"] and _looks_unseeded(tables, different):
        return CheckResult(
            PARAMETERS,
            TITLES[PARAMETERS],
            Status.WARNING,
            f"{found}; every rank seems to begin from random numbers of its own",
            "DDP copies rank 0's model to all when it wraps it; FSDP and loops of your own do not. "
            "Seed all ranks alike before the model is built, and differently after it.",
            numbers,
            ranks,
        )
    wrapped = "after wrapping" if facts[0]["wrapped"] else "before wrapping"
    return CheckResult(
        PARAMETERS,
        TITLES[PARAMETERS],
        Status.ERROR,
        found,
        f"The models differ {wrapped}: check which checkpoint, and how much of it, "
        f"{name_ranks(ranks)} loaded, and what is drawn at random while the model is built.",
        numbers,
        ranks,
    )


def _buffers(facts: Sequence[Facts]) -> CheckResult:
    tables = [fact["buffers"] for fact in facts]
    other = _other_layout(BUFFERS, "buffer", tables)
    if other:
        return other
    different = _differing(tables)
    numbers = _numbers(tables, different)
    if not different:
        return _equal(BUFFERS, "buffer", tables, numbers)
    ranks = _odd_ranks(tables, different)
    return CheckResult(
        BUFFERS,
        TITLES[BUFFERS],
        Status.ERROR,
        _told(different, ranks, len(facts), "buffer", len(tables[0])),
        "No gradient ever repairs a buffer: build or load buffers alike on all ranks, and let DDP "
        "broadcast them (broadcast_buffers=True).",
        numbers,
        ranks,
    )


def _optimizers(facts: Sequence[Facts]) -> CheckResult:
    optimizers = [fact["optimizer"] for fact in facts]
    title = TITLES[OPTIMIZER]
    if all(optimizer is None for optimizer in optimizers):
        found = "give --optimizer, or let the model's function return (module, optimizer)"
        return CheckResult(OPTIMIZER, title, Status.SKIPPED, found)
    settings = [(optimizer or {}).get("settings", {}) for optimizer in optimizers]
    names = list(dict.fromkeys(name for one in settings for name in one))
    different = {
        name: [one.get(name) for one in settings]
        for name in names
        if unlike_most([repr(one.get(name)) for one in settings])
    }
    if different:
        told = [_values_in_words(name, values) for name, values in different.items()]
        odd = {r for v in different.values() for r in unlike_most([repr(one) for one in v])}
        return CheckResult(
            OPTIMIZER,
            title,
            Status.ERROR,
            "; ".join(told[:_SHOWN]) + _more(len(told)),
            "Ranks that step differently drift apart although their gradients are equal: give all "
            "of them the same settings.",
            {"different": different},
            tuple(sorted(odd)),
        )
    tables = [(optimizer or {}).get("state", {}) for optimizer in optimizers]
    differing = _differing(tables) if len({tuple(table) for table in tables}) == 1 else ["its size"]
    if differing:
        digests = [repr(table) for table in tables]
        ranks = unlike_most(digests)
        return CheckResult(
            OPTIMIZER,
            title,
            Status.ERROR,
            f"what the optimizer remembers differs on {name_ranks(ranks)}, in "
            f"{', '.join(differing[:_SHOWN])}{_more(len(differing))}",
            f"Check which optimizer state {name_ranks(ranks)} loaded.",
            {"different": differing},
            ranks,
        )
    first = settings[0]
    found = f"{first['class']}, learning rate {first.get('group 0: lr')}, {len(names)} settings"
    return CheckResult(OPTIMIZER, title, Status.OK, found, numbers={"settings": first})


def _random_numbers(facts: Sequence[Facts]) -> CheckResult:
    drawn = list(facts[0]["rng"])
    states = {name: [fact["rng"].get(name) for fact in facts] for name in drawn}
    shared = {name: _sharing(values) for name, values in states.items()}
    dropout = [str(name) for name in facts[0]["dropout"]]
    numbers = {"sharing": shared, "dropout": dropout}
    if len(facts) == 1:
        return CheckResult(RNG, TITLES[RNG], Status.SKIPPED, "one rank has nobody to compare with")
    generator = "device" if "device" in shared else "torch"
    where = f"{len(dropout)} with dropout ({', '.join(dropout[:_SHOWN])}{_more(len(dropout))})"
    if shared[generator] and dropout:
        ranks = shared[generator]
        return CheckResult(
            RNG,
            TITLES[RNG],
            Status.WARNING,
            f"{name_ranks(ranks)} have the same state of torch's generator after the model is "
            f"built, and the model has modules that drop at random: {where}",
            "These ranks would drop the same units in each step. Seed them differently after the "
            "model is built: torch.manual_seed(seed + rank).",
            numbers,
            tuple(ranks),
        )
    alike = [name for name, ranks in shared.items() if ranks]
    if not alike:
        return CheckResult(RNG, TITLES[RNG], Status.OK, "different on all ranks", numbers=numbers)
    found = (
        f"equal on ranks: the generators of {', '.join(alike)}; that is usual where one seed is "
        "set for the model"
    )
    found += f"; those of {generator} differ, as dropout needs" if dropout else ", no dropout seen"
    advice = (
        "If noise or augmentation is drawn from them while training, seed them differently after "
        "the model is built."
    )
    return CheckResult(RNG, TITLES[RNG], Status.OK, found, advice, numbers)


def _batch_norms(facts: Sequence[Facts]) -> list[CheckResult]:
    names = [str(name) for name in facts[0]["batch_norms"]]
    if not names or len(facts) == 1:
        return []
    listed = f"{', '.join(names[:_SHOWN])}{_more(len(names))}"
    return [
        CheckResult(
            BATCH_NORM,
            TITLES[BATCH_NORM],
            Status.NOTE,
            f"{count(len(names), 'module')} with statistics of each rank's own batch: {listed}",
            "Small batches per rank make them noisy: torch.nn.SyncBatchNorm.convert_sync_batchnorm "
            "takes them over all ranks.",
            {"modules": names},
        )
    ]


def _other_layout(
    name: str, what: str, tables: Sequence[dict[str, list[Any]]]
) -> CheckResult | None:
    """Return the result when ranks have other names, shapes or types."""
    layouts = [tuple((key, repr(value[:2])) for key, value in table.items()) for table in tables]
    odd = unlike_most(layouts)
    if not odd:
        return None
    usual = next((r for r in range(len(tables)) if r not in odd), 0)
    others = [rank for rank in odd if layouts[rank] != layouts[usual]]
    strange, who = others[0], name_ranks(others)
    differing = sorted({key for key, _ in set(layouts[usual]) ^ set(layouts[strange])}) or [
        "their order"
    ]
    return CheckResult(
        name,
        TITLES[name],
        Status.ERROR,
        f"{who} built another model: names, shapes or types of {what}s are not those of rank "
        f"{usual} in {', '.join(differing[:_SHOWN])}{_more(len(differing))}",
        "Ranks would add up gradients that do not belong together: build the same model on all.",
        {"different": differing},
        odd,
    )


def _differing(tables: Sequence[dict[str, list[Any]]]) -> list[str]:
    return [key for key in tables[0] if len({repr(table[key][2]) for table in tables}) > 1]


def _odd_ranks(tables: Sequence[dict[str, list[Any]]], different: Sequence[str]) -> tuple[int, ...]:
    return unlike_most([tuple(table[key][2] for key in different) for table in tables])


def _looks_unseeded(tables: Sequence[dict[str, list[Any]]], different: Sequence[str]) -> bool:
    """Return whether all matrices differ between all ranks, as those drawn at random do."""
    matrices = [
        key for key, value in tables[0].items() if value[2] is not None and len(value[0]) > 1
    ]
    distinct = all(len({table[key][2] for table in tables}) == len(tables) for key in matrices)
    return bool(matrices) and distinct and set(matrices) <= set(different)


def _equal(
    name: str, what: str, tables: Sequence[dict[str, list[Any]]], numbers: dict[str, Any]
) -> CheckResult:
    split = sum(value[2] is None for value in tables[0].values())
    compared = len(tables[0]) - split
    if not tables[0]:
        return CheckResult(name, TITLES[name], Status.OK, f"the model has no {what}s")
    left_out = (
        f"{count(split, what)} not compared: each rank holds a part, or there is no content yet"
    )
    if not compared:
        return CheckResult(name, TITLES[name], Status.SKIPPED, left_out, numbers=numbers)
    bits = "the same bits on all ranks" if len(tables) > 1 else "one rank"
    found = f"{count(compared, what)}, {bits}" + (f"; {left_out}" if split else "")
    return CheckResult(name, TITLES[name], Status.OK, found, numbers=numbers)


def _told(
    different: Sequence[str], ranks: Sequence[int], num_ranks: int, what: str, of: int
) -> str:
    who = "all ranks differ" if len(ranks) == num_ranks else f"{name_ranks(ranks)} differ"
    if len(ranks) == 1:
        who = f"{name_ranks(ranks)} differs"
    listed = f"{', '.join(different[:_SHOWN])}{_more(len(different))}"
    return f"{who} in {len(different)} of {count(of, what)}: {listed}"


def _numbers(tables: Sequence[dict[str, list[Any]]], different: Sequence[str]) -> dict[str, Any]:
    return {"tensors": len(tables[0]), "different": list(different)}


def _values_in_words(name: str, values: Sequence[Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        groups.setdefault("missing" if value is None else shown, []).append(rank)
    told = [f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items()]
    return f"{name}: {', '.join(told[:_SHOWN])}"


def _sharing(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value some other rank has as well."""
    return [rank for rank, value in enumerate(values) if list(values).count(value) > 1]


def _more(number: int) -> str:
    return f" and {number - _SHOWN} more" if number > _SHOWN else ""


STAGE = Stage(
    "model",
    "Model and optimizer",
    look,
    judge,
    advice="The function must work on each rank as in the training. The process group exists "
    "already: leave init_process_group out of it.",
)
