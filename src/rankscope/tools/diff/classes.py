"""From the first parting of two runs to its class, and the verdict in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.bus.words import listed, name_ranks
from rankscope.stats.arrays import MISSING_INT
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.tools.diff.parting import (
    ComparedColumn,
    Pair,
    jump_of,
    most_apart,
    predicted,
    single_element,
    spike,
    tensors_at,
)
from rankscope.tools.diff.reading import Disagreement, dealt_otherwise
from rankscope.tools.diff.result import (
    Change,
    Comparison,
    Curve,
    DifferenceGrowth,
    Jump,
    Parting,
)
from rankscope.tools.stages import CLASS_OF, DiffClass, Stage

REDUCTION_ALLOWANCE = 30.0  # times the predicted distance, of a gradient whose parts may cancel

COMPUTE_ALLOWANCE = {"float32": 1024.0, "float64": 1024.0, "float16": 64.0, "bfloat16": 32.0}
"""Unit roundoffs that a forward and backward pass in another order may differ by."""

OTHER_UPDATE = 0.1  # share of an update by which two may differ whose gradients differ by rounding

LATER = {stage: CLASS_OF[stage] for stage in (Stage.SAMPLES, Stage.SETTINGS)}
"""Classes that rounding does not explain, when they follow a parting by rounding."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A class, the reasons for it, and where a bug-like difference sits.

    ``tensor`` differs where the first parting does not show it; ``settings`` are named as the
    cause; ``at`` is the number of the pair of steps that decided, where not the first parting's.
    ``headline`` and ``advice`` replace those of the class.
    """

    kind: DiffClass
    reasons: list[str] = field(default_factory=list)
    tensor: str = ""
    settings: tuple[Change, ...] = ()
    at: int | None = None
    headline: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class DifferenceCase:
    """The facts that decide a class.

    ``at`` is the number of the pair of steps where the runs first part; ``changes`` are settings
    and facts that differ; ``dtypes`` are the types in which A and B compute.
    """

    pair: Pair
    signals: Sequence[ComparedColumn]
    parting: Parting
    at: int
    changes: tuple[Change, ...]
    dtypes: tuple[str, str]

    def of_kind(self, *kinds: str) -> tuple[Change, ...]:
        """Return the differences of these kinds."""
        return tuple(change for change in self.changes if change.kind in kinds)

    def differs(self, stage: Stage) -> list[ComparedColumn]:
        """Return the signals of a stage that differ where the runs first part."""
        return [s for s in self.signals if s.stage is stage and s.differs_PW[self.at].any()]


def judge(case: DifferenceCase, jump: Jump | None) -> Judgement:
    """Return the class of a difference."""
    found = _by_first_stage(case)
    if found.kind is DiffClass.ROUNDING:
        found = _other_update(case) or _later_event(case) or found
    if found.kind is DiffClass.ROUNDING and jump is not None:
        return _jumped(case, jump)
    return found


def _jumped(case: DifferenceCase, jump: Jump) -> Judgement:
    at = int(np.searchsorted(case.pair.alignment.steps_a, jump.step))
    words = (
        f"the relative distance of the {jump.curve} jumps to {jump.after:.2g}, from at most "
        f"{jump.before:.2g} before."
    )
    settings: tuple[Change, ...] = ()
    diverged = case.pair.divergence()
    if jump.curve == "loss" and diverged is not None and diverged[0] == at:
        words = f"the losses of run {diverged[1]} alone are infinite or not a number."
        settings = case.of_kind("dtype")
    reason = f"From step {case.parting.step} on the runs differ by rounding, but in step "
    return Judgement(DiffClass.JUMP, [f"{reason}{jump.step} {words}"], jump.tensor, settings, at)


def _other_update(case: DifferenceCase) -> Judgement | None:
    """Judge an optimizer that makes another step of gradients that agree up to rounding."""
    if case.of_kind("dtype") or case.parting.stage is Stage.UPDATE:
        return None
    before, after = (case.pair.distance(case.at, "parameter", back=back) for back in (1, 0))
    taken = case.pair.update(case.at)
    if before is not None and after is not None and taken > 0:
        apart = float(np.sqrt((after.distance_N**2).sum()))
        other = apart > OTHER_UPDATE * taken
        words = f"the update of the parameters differs by {apart / taken:.2g} of its size"
    else:
        size = _next_size(case)
        other = size > _allowance(case, Stage.LOSS)
        words = f"the losses of the next step differ by {size:.2g}"
    if not other:
        return None
    reason = f"The gradients differ by rounding only, but {words}."
    if case.at == 0 and any("continues" in side.info for side in (case.pair.a, case.pair.b)):
        return Judgement(
            DiffClass.STATE, [reason, "What the optimizer remembers differs from the start."]
        )
    if case.parting.stage is Stage.LOSS:
        reason = f"The losses of the step differ by rounding only, but {words}."
        return Judgement(
            DiffClass.JUMP,
            [reason],
            most_apart(after),
            headline=f"From equal losses, the runs make other updates in step {case.parting.step}.",
            advice=(
                "Compare what the loss is divided by, how gradients are reduced and clipped, and "
                "the optimizers and what they remember."
            ),
        )
    return Judgement(DiffClass.JUMP, [reason], most_apart(after))


def _by_first_stage(case: DifferenceCase) -> Judgement:
    stage = case.parting.stage
    if stage is Stage.SAMPLES:
        return Judgement(DiffClass.DATA)
    if stage is Stage.RANDOM:
        return Judgement(DiffClass.STATE, ["The random generators stand at other places."])
    if stage is Stage.START:
        return _before(case)
    if case.differs(Stage.SETTINGS):
        settings = case.of_kind("training") or case.of_kind("dtype")
        return Judgement(DiffClass.CONFIGURATION, settings=settings)
    return _computed(case)


def _before(case: DifferenceCase) -> Judgement:
    """Judge models that differ before their first common step."""
    apart = tensors_at(case.pair, case.at, Stage.START)
    only = single_element(apart)
    if only:
        return Judgement(
            DiffClass.JUMP,
            [f"One element of {only} differs before the first common step, and nothing else."],
            only,
        )
    typed = case.of_kind("dtype")
    if typed and case.parting.relative <= _allowance(case, Stage.START):
        return Judgement(
            DiffClass.ROUNDING,
            ["The parameters are the same ones, rounded to another type."],
            settings=typed,
        )
    return Judgement(
        DiffClass.STATE, ["Parameters, buffers or optimizer state differ before any step."]
    )


def _computed(case: DifferenceCase) -> Judgement:
    """Judge a parting whose data, generators, parameters and settings are equal."""
    stage = case.parting.stage
    size = size_of(case)
    allowed = _allowance(case, stage)
    shown = sign_of_bug(case)
    if shown is not None:
        return shown
    if size <= allowed or (math.isnan(size) and _next_size(case) <= _allowance(case, Stage.LOSS)):
        reasons = _sizes(size, allowed)
    elif stage is Stage.GRADIENT and _like_16_bits(case, size):
        reasons = ["The distance is that of a reduction in 16 bits."]
    else:
        return _beyond_rounding(case, size, allowed)
    later = _gradient_of_losses(case) if stage is Stage.LOSS else None
    return later or Judgement(DiffClass.ROUNDING, reasons, settings=case.of_kind("dtype"))


def _gradient_of_losses(case: DifferenceCase) -> Judgement | None:
    """Judge gradients that differ by more than rounding, of losses that do not.

    Between other numbers of workers, recorded gradients have other multiples of the loss.
    """
    if not case.pair.alignment.same_width:
        return None
    allowed = max(_allowance(case, stage) for stage in (Stage.LOCAL, Stage.GRADIENT))
    for stage in (Stage.LOCAL, Stage.GRADIENT):
        of_stage = replace(case, parting=replace(case.parting, stage=stage, num_tensors=None))
        size = size_of(of_stage)
        if size > allowed:
            words = f"The losses of the step differ by rounding, but not the {stage}."
            found = _beyond_rounding(of_stage, size, allowed)
            if found.kind is DiffClass.CONFIGURATION:
                return replace(found, reasons=[words, *found.reasons])
            return Judgement(
                DiffClass.JUMP,
                [words, *_sizes(size, allowed)],
                headline=f"From equal losses, the runs compute other gradients in step "
                f"{case.parting.step}.",
                advice=(
                    "Compare what backward is called on, what the loss is divided by, and what "
                    "changes gradients after it."
                ),
            )
    return None


def _beyond_rounding(case: DifferenceCase, size: float, allowed: float) -> Judgement:
    reasons = _sizes(size, allowed)
    changes = case.of_kind("dtype", "training", "reduction")
    if case.at == 0 or changes:
        changes = changes or (() if case.of_kind("seed") else case.of_kind("config"))
        if changes:
            return Judgement(DiffClass.CONFIGURATION, reasons, settings=changes)
        division = _other_division(case)
        if division:
            return Judgement(
                DiffClass.CONFIGURATION,
                [*reasons, "The forward pass draws random numbers, which depend on this division."],
                settings=division,
                advice="Compare the two without dropout, such as by rankscope parity --no-dropout.",
            )
        unequal = _unequal_weights(case)
        if unequal:
            where = f"they part in step {case.parting.step}"
            return Judgement(
                DiffClass.CONFIGURATION,
                [*reasons, unequal],
                headline=f"The runs divide the batch among other numbers of workers; {where}.",
            )
    same_start = bool(case.pair.a.begun_with) and case.pair.a.begun_with == case.pair.b.begun_with
    if case.at == 0 and same_start and case.parting.stage is Stage.LOSS:
        return Judgement(
            DiffClass.JUMP,
            [*reasons, "Both begin with the same parameters, bit for bit, and with equal data."],
            headline="From equal parameters and data, the runs compute different losses.",
            advice=(
                "Compare the code of the forward pass, what it reads besides parameters (buffers, "
                "files), and the command lines."
            ),
        )
    if case.at == 0 and case.parting.stage is not Stage.GRADIENT:
        where = "The optimizer's state" if case.parting.stage is Stage.UPDATE else "What they hold"
        return Judgement(
            DiffClass.STATE,
            [*reasons, f"{where} differs already in the first common step, with equal data."],
        )
    apart = case.pair.distance(case.at, "parameter")
    tensor = case.parting.tensor or spike(apart) or most_apart(apart)
    reason = "Data, state and configuration are equal."
    return Judgement(DiffClass.JUMP, [*reasons, reason], tensor)


def sign_of_bug(case: DifferenceCase) -> Judgement | None:
    """Return a difference that no rounding causes: one element, or some workers alone."""
    stage = case.parting.stage
    at = case.at
    inside = _inside_one_run(case)
    if stage in (Stage.GRADIENT, Stage.UPDATE):
        only = single_element(tensors_at(case.pair, at, stage))
        if only:
            reason = f"A single element of {only} differs, and no other tensor does."
            return Judgement(DiffClass.JUMP, [reason], only)
    elif at > 0 or case.pair.distance(0, "parameter", back=1) is not None:
        name = spike(case.pair.distance(at, "parameter"))
        if name:
            reason = f"Nearly all of the distance after the step is one element of {name}."
            return Judgement(DiffClass.JUMP, [reason], name)
    ranks = case.parting.ranks
    if inside is not None:
        who = " and ".join(map(str, inside.ranks)) or "some"
        reason = (
            f"From step {inside.step} on, in one of the runs, worker {who} holds another "
            f"{inside.name} ({inside.kind}) than the others."
        )
        return Judgement(DiffClass.JUMP, [reason], inside.name)
    if ranks and case.pair.alignment.same_width and len(ranks) < case.pair.a.num_workers:
        if stage is Stage.LOCAL and size_of(case) <= _allowance(case, stage):
            return None  # kernels that add up in any order differ now and then
        if at == 0 and size_of(case) > _allowance(case, stage) and stage is Stage.LOSS:
            return None
        words = ", ".join(map(str, ranks))
        reason = f"Only worker {words} computes something else; the others agree to the last bit."
        apart = case.pair.distance(at, "parameter")
        return Judgement(DiffClass.JUMP, [reason], case.parting.tensor or most_apart(apart))
    return None


def size_of(case: DifferenceCase) -> float:
    """Return the relative distance where the runs first part; NaN where only digests differ."""
    signals = case.differs(case.parting.stage)
    sizes = [
        float(np.nanmax(s.relative_PW[case.at]))
        for s in signals
        if not np.isnan(s.relative_PW[case.at]).all()
    ]
    if case.parting.num_tensors is not None:
        return case.parting.relative if not math.isnan(case.parting.relative) else math.inf
    return max(sizes, default=math.nan)


def _allowance(case: DifferenceCase, stage: Stage) -> float:
    """Return the relative distance up to which rounding explains a parting."""
    coarsest = max(case.dtypes, key=UNIT_ROUNDOFF.__getitem__)
    compute = COMPUTE_ALLOWANCE[coarsest] * UNIT_ROUNDOFF[coarsest]
    if stage is not Stage.GRADIENT:
        return compute
    typed = bool(case.of_kind("dtype"))
    reduction = predicted(case.pair, case.at, case.dtypes, rounded=typed)
    other_batches = not case.pair.alignment.same_width or typed
    allowed = REDUCTION_ALLOWANCE * reduction
    return max(allowed, compute) if other_batches else allowed


def _like_16_bits(case: DifferenceCase, size: float) -> bool:
    """Return whether all tensors part from the first step as a 16-bit reduction predicts."""
    apart = case.pair.distance(case.at, "reduced")
    spread = apart is None or bool(apart.differs_N[apart.norms_N > 0].all())
    if case.at > 0 or not spread:
        return False
    return any(
        0.2 <= size / predicted(case.pair, case.at, (one, other), rounded=True) <= 5
        for one in ("float32", "bfloat16", "float16")
        for other in ("bfloat16", "float16")
    )


def _next_size(case: DifferenceCase) -> float:
    """Return the largest relative distance of losses in the next step; 0 without one."""
    at = case.at + 1
    losses = [s for s in case.signals if s.name == "loss"]
    if at >= len(case.pair) or not losses or np.isnan(losses[0].relative_PW[at]).all():
        return 0.0
    return float(np.nanmax(losses[0].relative_PW[at]))


def _inside_one_run(case: DifferenceCase) -> Disagreement | None:
    """Return where workers of one run differ from each other, if the other run's do not."""
    if not case.pair.alignment.same_width:
        return None
    one = case.pair.a.disagreement
    other = case.pair.b.disagreement
    if (one is None) == (other is None):
        return None
    found = one or other
    if found is None:
        return None
    first = case.parting.step if one is not None else case.parting.step_b
    return found if found.step >= first else None


_DRAWN = 15  # bits of the generators that moved in a step's own forward passes


def _other_division(case: DifferenceCase) -> tuple[Change, ...]:
    """Return how the sides divide a batch, if otherwise and random numbers are drawn from it."""
    sides = (case.pair.a, case.pair.b)
    used = [side.column("rng_used") for side in sides]
    if not any(((each != MISSING_INT) & (each & _DRAWN > 0)).any() for each in used):
        return ()
    numbers = {
        "workers": case.pair.alignment.num_workers,
        "micro-batches": _micro_batches(case.pair),
    }
    return tuple(
        Change(name, one, other, "training")
        for name, (one, other) in numbers.items()
        if one != other and min(one, other) > 0
    )


def _micro_batches(pair: Pair) -> tuple[int, int]:
    """Return the largest number of micro-batches in a step of A and of B; negative if unknown."""
    own, more = (int(side.column("micro_batches").max()) for side in (pair.a, pair.b))
    return own, more


def _unequal_weights(case: DifferenceCase) -> str:
    """Return a note that means of workers' means depend on W, if their token counts differ."""
    if case.pair.alignment.same_width:
        return ""
    for side in (case.pair.a, case.pair.b):
        weights = side.column("loss_weight")
        if np.isfinite(weights).all() and (weights.max(axis=1) > weights.min(axis=1)).any():
            return (
                "Workers have unequal numbers of label tokens: a mean of their means is another "
                "number when the batch is dealt to other workers; weight the loss by tokens."
            )
    return ""


def _later_event(case: DifferenceCase) -> Judgement | None:
    """Judge other data or settings after the parting; not what follows a divergence."""
    diverged = case.pair.divergence()
    for stage, kind in LATER.items():
        rows = [
            int(np.flatnonzero(s.differs_PW.any(axis=1))[0])
            for s in case.signals
            if s.stage is stage and s.differs_PW.any()
        ]
        if rows and (diverged is None or min(rows) <= diverged[0]):
            step = int(case.pair.alignment.steps_a[min(rows)])
            what = "data" if stage is Stage.SAMPLES else "settings of the optimizer"
            reason = (
                f"The runs part by rounding in step {case.parting.step}, and have other {what} "
                f"from step {step} on."
            )
            settings = case.of_kind("training") if kind is DiffClass.CONFIGURATION else ()
            return Judgement(kind, [reason], settings=settings, at=min(rows))
    return None


def _sizes(size: float, allowed: float) -> list[str]:
    if math.isnan(size):
        return [
            "Digests alone show where they part, so the size is not known there; the losses of the "
            "next step are as near as rounding leaves them."
        ]
    if not math.isfinite(size):
        return ["One of the two is infinite or not a number."]
    word = "within" if size <= allowed else "beyond"
    return [f"The relative distance is {size:.2g}, {word} what rounding explains ({allowed:.2g})."]


MAX_NAMED = 4  # settings or workers that a sentence names
MAX_TENSORS = 100  # tensors that a comparison lists, those farthest apart first


def _compared(pair: Pair) -> str:
    """Return what was compared of runs without traces."""
    known = "samples, losses, gradient norms, settings"
    if not pair.alignment.same_slots:
        return (
            f"Compared: {known} and random generators. Digests were not: which tensors they cover "
            "follows the number of the step, and the runs have other ones."
        )
    return (
        f"Compared: {known}, random generators, and digests of parameters, optimizer state and "
        "reduced gradients as they took turns."
    )


def identical(pair: Pair, changes: tuple[Change, ...], curves: tuple[Curve, ...]) -> Comparison:
    """Return the comparison of two runs without a difference."""
    explanation = [pair.alignment.words[:1].upper() + pair.alignment.words[1:] + "."]
    if not pair.a.traces or not pair.b.traces:
        explanation.append(_compared(pair))
    else:
        explanation.append("Compared: all of that, and every traced tensor, bit by bit.")
    if changes:
        some = ", ".join(change.name for change in changes[:MAX_NAMED])
        explanation.append(f"What differs in their settings has changed no bit: {some}.")
    early = _ended_early(pair)
    headline = f"All {len(pair):,} common steps are equal in every bit that was recorded"
    advice = _ADVICE[DiffClass.IDENTICAL]
    if early:
        paths = [pair.a.name if side == "A" else pair.b.name for side in early]
        headline += f", and {listed(early)} ended early"
        commands = listed([f"rankscope report {path}" for path in paths])
        advice = f"Find out why, and compare whole runs: {commands}"
    return Comparison(
        run_a=pair.a.name,
        run_b=pair.b.name,
        kind=DiffClass.IDENTICAL,
        headline=f"{headline}.",
        explanation=tuple(explanation),
        advice=advice,
        causes=(),
        alignment=pair.alignment,
        changes=changes,
        curves=curves,
        ended_early=early,
    )


def _ended_early(pair: Pair) -> tuple[str, ...]:
    """Return which of A and B lacks steps of the other, as its training was cut short."""
    steps = len(pair.a.steps_T), len(pair.b.steps_T)
    sides = zip(("A", "B"), (pair.a, pair.b), steps, steps[::-1], strict=True)
    cut = ("incomplete", "interrupted")
    return tuple(n for n, side, own, other in sides if own < other and side.run.status in cut)


def different(
    case: DifferenceCase, curves: tuple[Curve, ...], growth: DifferenceGrowth | None
) -> Comparison:
    """Judge a difference, and put the judgement into words."""
    pair = case.pair
    parting = case.parting
    jump = jump_of(pair, curves)
    judgement = judge(case, jump)
    explanation = [_where(parting), *judgement.reasons]
    explanation += _of_data(pair, case) if parting.stage is Stage.SAMPLES else []
    if not math.isnan(parting.predicted):
        explanation.append(
            f"Rounding of a reduction over these workers predicts {parting.predicted:.2g} here."
        )
    if growth is not None and judgement.kind in (DiffClass.ROUNDING, DiffClass.JUMP):
        explanation.append(grows(growth))
    explanation.append(parting.resolution)
    apart = tensors_at(pair, case.at, parting.stage)
    relative = {} if apart is None else apart.relative()
    if judgement.tensor and not parting.tensor:
        parting = replace(parting, tensor=judgement.tensor)
    return Comparison(
        run_a=pair.a.name,
        run_b=pair.b.name,
        kind=judgement.kind,
        headline=judgement.headline or _headline(pair, case, judgement),
        explanation=tuple(explanation),
        advice=judgement.advice or _ADVICE[judgement.kind],
        causes=tuple(_causes(pair, case, judgement)),
        alignment=pair.alignment,
        parting=parting,
        growth=growth,
        jump=jump if judgement.kind is DiffClass.JUMP else None,
        changes=case.changes,
        curves=curves,
        tensors=dict(list(relative.items())[:MAX_TENSORS]),
        ended_early=_ended_early(pair),
    )


_ADVICE = {
    DiffClass.IDENTICAL: "Nothing to do.",
    DiffClass.ROUNDING: (
        "No sign of a bug. To get the same bits, remove the causes named here: equal types, equal "
        "numbers of workers and micro-batches, and a reduction whose order is fixed."
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


def _short(name: str) -> str:
    """Return a setting's name without the prefix that all have."""
    return name.removeprefix("training.").replace(".groups.0.", ".")


def named(change: Change) -> str:
    """Return a difference with both values, in words."""
    return f"{_short(change.name)}: {change.a} in A, {change.b} in B"


def grows(growth: DifferenceGrowth) -> str:
    """Return how a distance grows, in words."""
    span = f"from {growth.first:.2g} to {growth.last:.2g} in {growth.num_steps} steps"
    if growth.last <= growth.first:
        return f"The distance of the {growth.curve} does not grow: {span}."
    if growth.shape == "exponential":
        rate = f"by a factor of {growth.factor:.3g} per step"
    elif growth.shape == "power":
        rate = f"like the number of steps to the power {growth.exponent:.2g}"
    else:
        rate = "by no clear law"
    return f"The distance of the {growth.curve} grows {span}, {rate}."


def _headline(pair: Pair, case: DifferenceCase, judgement: Judgement) -> str:
    parting = case.parting
    kind = judgement.kind
    step = int(pair.alignment.steps_a[case.at if judgement.at is None else judgement.at])
    if kind is DiffClass.DATA:
        return f"The runs train on different data from step {step} on."
    if kind is DiffClass.STATE:
        what = "random generators" if parting.stage is Stage.RANDOM else "state"
        return f"The runs begin step {step} with different {what}."
    if kind is DiffClass.CONFIGURATION:
        some = ", ".join(_short(change.name) for change in judgement.settings[:MAX_NAMED])
        what = some or parting.signal
        return f"The runs are configured differently ({what}); they part in step {step}."
    where = f" in {judgement.tensor}" if judgement.tensor else ""
    if kind is DiffClass.JUMP:
        return f"A sudden difference{where} in step {step}, more than rounding explains."
    if judgement.settings:
        cause = "another type"
    else:
        same = pair.alignment.same_width
        cause = "another order of summation" if same else "another number of workers"
    return f"The runs differ by rounding alone ({cause}), from step {step} on."


def _where(parting: Parting) -> str:
    words = f"They first part in step {parting.step}"
    if parting.step_b != parting.step:
        words += f" (step {parting.step_b} of B)"
    words += f", in the {parting.stage}"
    if parting.ranks and parting.stage is not Stage.SAMPLES:
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
    ids = _ids(one)
    words.append(f"{len({*ids} & {*_ids(other)})} of {len(ids)} samples of this step are in both.")
    common = zip(pair.alignment.steps_a.tolist(), pair.alignment.steps_b.tolist(), strict=True)
    pairs = [(pair.a.samples.get(s, {}), pair.b.samples.get(t, {})) for s, t in common]
    if sorted(i for left, _ in pairs for i in _ids(left)) == sorted(
        i for _, right in pairs for i in _ids(right)
    ):
        words.append("Over all compared steps both have the same samples, in another order.")
    return words


def _ids(samples: Mapping[int, Any]) -> list[int]:
    return [int(i) for ids in samples.values() for i in ids]


def _causes(pair: Pair, case: DifferenceCase, judgement: Judgement) -> list[str]:
    """Return possible causes, most probable first."""
    kind = judgement.kind
    found = [named(change) for change in judgement.settings]
    continued = [
        f"run {name} continues {side.info['continues']}"
        for name, side in (("A", pair.a), ("B", pair.b))
        if "continues" in side.info
    ]
    if kind is DiffClass.ROUNDING:
        if not pair.alignment.same_width:
            one, other = pair.alignment.num_workers
            found.append(f"number of workers: {one} in A, {other} in B")
        own, more = _micro_batches(pair)
        if own != more and min(own, more) > 0:
            found.append(f"number of micro-batches: {own} in A, {more} in B")
        found += [named(c) for c in case.of_kind("reduction", "environment")]
        found += _order_of_samples(pair, case)
        if case.at == 0:
            why = "in the first step after a restart, DDP adds up in other buckets"
            found += [f"{each}: {why}" for each in continued]
    elif kind is DiffClass.DATA:
        found += [named(c) for c in case.of_kind("seed", "loader", "config")]
    elif kind is DiffClass.STATE:
        found += [named(c) for c in case.of_kind("seed", "config", "environment")]
        found += [f"{each}: not all state was restored" for each in continued]
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
