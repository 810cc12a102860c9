"""The verdict on two runs, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.bus.words import name_ranks
from rankscope.tools.diff.classes import DifferenceCase, Judgement
from rankscope.tools.diff.reading import dealt_otherwise
from rankscope.tools.diff.result import Change, DiffClass, DifferenceGrowth, Moment, Parting
from rankscope.tools.diff.signals import Pair

MAX_NAMED = 4
"""Settings or workers that a sentence names."""


@dataclass(frozen=True, slots=True)
class DiffText:
    """Headline, evidence for it, advice, and possible causes."""

    headline: str
    explanation: list[str]
    advice: str
    causes: list[str]


def describe(
    pair: Pair,
    changes: Sequence[Change],
    judgement: Judgement,
    case: DifferenceCase | None,
    growth: DifferenceGrowth | None,
) -> DiffText:
    """Put a judgement into words."""
    if case is None:
        return _identical(pair, changes)
    parting = case.parting
    explanation = [_where(parting), *judgement.reasons]
    explanation += _of_data(pair, case) if parting.moment is Moment.DATA else []
    if not math.isnan(parting.predicted):
        explanation.append(
            f"Rounding of a reduction over these workers predicts {parting.predicted:.2g} here."
        )
    if growth is not None and judgement.kind in (DiffClass.ROUNDING, DiffClass.JUMP):
        explanation.append(grows(growth))
    explanation.append(parting.resolution)
    headline = _headline(pair, case, judgement)
    return DiffText(headline, explanation, _ADVICE[judgement.kind], _causes(pair, case, judgement))


_ADVICE = {
    DiffClass.IDENTICAL: "Nothing to do.",
    DiffClass.ROUNDING: (
        "No sign of a bug. To get the same bits, remove the causes named here: equal types, equal "
        "number of workers, and a reduction whose order is fixed."
    ),
    DiffClass.DATA: (
        "Compare the samplers' seeds, the shuffling and the sharding of both runs; what follows in "
        "numbers has this cause."
    ),
    DiffClass.STATE: (
        "Compare the seeds and the checkpoint: parameters, buffers, optimizer state and random "
        "generators must all be restored."
    ),
    DiffClass.CONFIGURATION: "Make the named settings equal, then compare again.",
    DiffClass.JUMP: (
        "Rounding does not explain it: check this step, this tensor and these workers for memory "
        "or hardware errors and for code that runs in this step only; run rankscope report on both."
    ),
}


def named(change: Change) -> str:
    """Return a difference with both values, in words."""
    return f"{short(change.name)}: {change.a} in A, {change.b} in B"


def short(name: str) -> str:
    """Return a setting's name without the prefix that all have."""
    return name.removeprefix("training.").replace(".groups.0.", ".")


def grows(growth: DifferenceGrowth) -> str:
    """Return how a distance grows, in words."""
    span = f"from {growth.first:.2g} to {growth.last:.2g} in {growth.num_steps} steps"
    if growth.shape == "exponential":
        rate = f"by a factor of {growth.factor:.3g} per step"
    elif growth.shape == "power":
        rate = f"like the number of steps to the power {growth.exponent:.2g}"
    else:
        rate = "by no clear law"
    return f"The distance of the {growth.curve} grows {span}, {rate}."


def _identical(pair: Pair, changes: Sequence[Change]) -> DiffText:
    count = len(pair)
    explanation = [pair.alignment.words[:1].upper() + pair.alignment.words[1:] + "."]
    if not pair.a.traces or not pair.b.traces:
        explanation.append(
            "Compared: samples, losses, gradient norms, settings, random generators, and digests "
            "of parameters, optimizer state and reduced gradients as they took turns."
        )
    else:
        explanation.append("Compared: all of that, and every traced tensor, bit by bit.")
    if changes:
        some = ", ".join(change.name for change in changes[:MAX_NAMED])
        explanation.append(f"What differs in their settings has changed no bit: {some}.")
    headline = f"All {count:,} common steps are equal in every bit that was recorded."
    return DiffText(headline, explanation, _ADVICE[DiffClass.IDENTICAL], [])


def _headline(pair: Pair, case: DifferenceCase, judgement: Judgement) -> str:
    parting = case.parting
    kind = judgement.kind
    step = int(pair.alignment.steps_a[case.at if judgement.at is None else judgement.at])
    if kind is DiffClass.DATA:
        return f"The runs train on different data from step {step} on."
    if kind is DiffClass.STATE:
        what = "random generators" if parting.moment is Moment.RANDOM else "state"
        return f"The runs begin step {step} with different {what}."
    if kind is DiffClass.CONFIGURATION:
        some = ", ".join(short(change.name) for change in judgement.settings[:MAX_NAMED])
        what = some or parting.signal
        return f"The runs are configured differently ({what}); they part in step {step}."
    where = f" in {judgement.tensor}" if judgement.tensor else ""
    if kind is DiffClass.JUMP:
        return f"A sudden difference{where} in step {step}, more than rounding explains."
    cause = _rounding_cause(pair, judgement)
    return f"The runs differ by rounding alone ({cause}), from step {step} on."


def _rounding_cause(pair: Pair, judgement: Judgement) -> str:
    if judgement.settings:
        return "another type"
    if not pair.alignment.same_width:
        return "another number of workers"
    return "another order of summation"


def _where(parting: Parting) -> str:
    words = f"They first part in step {parting.step}"
    if parting.step_b != parting.step:
        words += f" (step {parting.step_b} of B)"
    words += f", in the {parting.moment}"
    if parting.ranks and parting.moment is not Moment.DATA:
        words += f" of {workers_in_words(parting.ranks)}"
    if parting.num_tensors is not None:
        words += f": {parting.num_tensors[0]} of {parting.num_tensors[1]} tensors"
        words += f", {parting.tensor} most" if parting.num_tensors[0] > 1 else f", {parting.tensor}"
    elif not math.isnan(parting.value_a):
        words += f": {parting.signal} {parting.value_a:.9g} in A, {parting.value_b:.9g} in B"
    else:
        words += f" ({parting.signal})"
    return words + "."


def _of_data(pair: Pair, case: DifferenceCase) -> list[str]:
    step_a = case.parting.step
    step_b = case.parting.step_b
    one = pair.a.samples.get(step_a)
    other = pair.b.samples.get(step_b)
    if one is None or other is None:
        return [f"Batches differ on {workers_in_words(case.parting.ranks)}, by their digests."]
    moved = dealt_otherwise(one, other) if pair.alignment.same_width else None
    if moved:
        who = "; ".join(f"worker {rank} of B has worker {owner}'s" for rank, owner in moved.items())
        return [
            "The global batch is the same, but it is dealt to other workers: "
            f"{who}. Their mean differs by rounding only."
        ]
    if pair.a.batches.get(step_a) == pair.b.batches.get(step_b):
        return ["The global batch is the same, but its samples lie on other workers."]
    words = []
    if case.parting.ranks:
        words.append(f"Other samples on {workers_in_words(case.parting.ranks)}.")
    shared = set(map(int, _ids(one))) & set(map(int, _ids(other)))
    words.append(f"{len(shared)} of {len(_ids(one))} samples of this step are in both.")
    common = zip(pair.alignment.steps_a.tolist(), pair.alignment.steps_b.tolist(), strict=True)
    pairs = [(pair.a.samples.get(s, {}), pair.b.samples.get(t, {})) for s, t in common]
    all_a = sorted(int(i) for left, _ in pairs for i in _ids(left))
    all_b = sorted(int(i) for _, right in pairs for i in _ids(right))
    if all_a == all_b:
        words.append("Over all compared steps both have the same samples, in another order.")
    return words


def _ids(samples: dict) -> list[int]:  # type: ignore[type-arg]
    return [int(i) for ids in samples.values() for i in ids]


def _causes(pair: Pair, case: DifferenceCase, judgement: Judgement) -> list[str]:
    """Return possible causes, most probable first."""
    kind = judgement.kind
    found = [named(change) for change in judgement.settings]
    if kind is DiffClass.ROUNDING:
        if not pair.alignment.same_width:
            one, other = pair.alignment.num_workers
            found.append(f"number of workers: {one} in A, {other} in B")
        found += [named(c) for c in case.of_kind("reduction", "environment")]
        found += _order_of_samples(pair, case)
        found += [
            f"run {name} continues {side.info['continues']}: in the first step after a restart, "
            "DDP adds up in other buckets"
            for name, side in (("A", pair.a), ("B", pair.b))
            if "continues" in side.info and case.at == 0
        ]
    elif kind is DiffClass.DATA:
        found += [named(c) for c in case.of_kind("seed", "loader", "config")]
    elif kind is DiffClass.STATE:
        found += [named(c) for c in case.of_kind("seed", "config", "environment")]
        found += [
            f"run {name} continues {side.info['continues']}: not all state was restored"
            for name, side in (("A", pair.a), ("B", pair.b))
            if "continues" in side.info
        ]
    elif kind is DiffClass.CONFIGURATION:
        found += [named(c) for c in case.of_kind("training", "dtype", "config")]
        if not found and not math.isnan(case.parting.value_a):
            shown = case.parting
            found.append(f"{shown.signal}: {shown.value_a:.9g} in A, {shown.value_b:.9g} in B")
    else:
        found += [named(c) for c in case.of_kind("environment")]
    return list(dict.fromkeys(found))


def _order_of_samples(pair: Pair, case: DifferenceCase) -> list[str]:
    """Return the workers whose batch holds the same samples in another order."""
    if not pair.alignment.same_width:
        return []
    one = pair.a.samples.get(case.parting.step, {})
    other = pair.b.samples.get(case.parting.step_b, {})
    ranks = [r for r, ids in one.items() if r in other and ids.tolist() != other[r].tolist()]
    return [f"order of the samples inside the batch of {workers_in_words(ranks)}"] if ranks else []


def workers_in_words(ranks: Sequence[int]) -> str:
    """Return ``worker 2``, ``workers 0–3``, or ``workers 0, 2 and 5``."""
    return name_ranks(ranks, limit=MAX_NAMED).replace("rank", "worker", 1)
