"""Audited updates at the root: collects the workers' shares of a step, and judges them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankscope.bus.detector import finding_at
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.shares import ShareDirector
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.evidence.update.compare import (
    MOST,
    MOST_OF_SMALL,
    OddUpdate,
    UpdateMismatch,
    UpdateShare,
    UpdateVerdict,
    judge_update,
)

_MOST_NAMED = 3
_CHOSEN = (
    f" Of one optimizer, {MOST} parameters of different shapes are compared at a time, or "
    f"{MOST_OF_SMALL} of a small model, and others in another step."
)
_WEIGHTS = (UpdateMismatch.MOVED, UpdateMismatch.NOT_COPIED)


def in_words(
    verdict: UpdateVerdict, shares_W: Sequence[UpdateShare], step: int
) -> Iterator[Finding]:
    """Yield the findings of an audited update."""
    hooks = list(dict.fromkeys(hook for share in shares_W for hook in share.hooks))
    num_parameters = max(len(verdict.compared), *(share.num_parameters for share in shares_W))
    for cause, odd in (
        ("update.differs", [one for one in verdict.odd if one.how not in _WEIGHTS]),
        ("update.weights", [one for one in verdict.odd if one.how in _WEIGHTS]),
    ):
        if odd:
            yield _differing(cause, odd, hooks, step)
    declined = {kind: why for share in shares_W for kind, why in share.declined.items()}
    if declined or not (verdict.compared or verdict.odd):
        yield _declined(declined, step)
    num_seen = len(verdict.compared) + len(verdict.unseen)
    if verdict.compared and not verdict.odd:
        fields = {
            "step": f"{step:,}",
            "optimizers": _computed(verdict.optimizers),
            "number": f"{len(verdict.compared):,} of {count(num_parameters, 'parameter')}",
            "resting": _resting(verdict),
            "unseen": _unseen(verdict),
            "later": _later(verdict),
            "chosen": _CHOSEN if MOST <= num_seen < num_parameters else "",
            "error": f"{verdict.error:.1e}",
            "parameter": verdict.parameter,
        }
        numbers = {
            "parameters": list(verdict.compared[:64]),
            "error": verdict.error,
            "resting": [list(one) for one in verdict.resting[:64]],
        }
        yield finding_at(step, "update.agrees", Severity.NOTE, (), fields, numbers)


def _differing(cause: str, odd: Sequence[OddUpdate], hooks: Sequence[str], step: int) -> Finding:
    alike: dict[tuple[object, ...], list[OddUpdate]] = {}
    for one in odd:
        alike.setdefault((one.how, one.axis, one.ranks), []).append(one)
    parts = [
        f"{shortened([one.name for one in same], _MOST_NAMED)}: {_how(same)}"
        for same in alike.values()
    ]
    fields = {
        "step": f"{step:,}",
        "optimizers": _computed([one.optimizer for one in odd]),
        "how": "; ".join(parts),
        "hooks": f" After it, {listed(hooks)} ran as hooks of the optimizer." if hooks else "",
    }
    meant = all(one.how in (UpdateMismatch.ALONE, UpdateMismatch.MOVED) for one in odd)
    severity = (
        Severity.WARNING if meant or (hooks and cause == "update.differs") else Severity.ERROR
    )
    every = any(not one.ranks for one in odd)
    ranks = () if every else tuple(sorted({rank for one in odd for rank in one.ranks}))
    numbers = {
        "parameters": [
            [one.name, str(one.how), one.cosine, one.ratio, one.error, one.bound]
            for one in odd[:64]
        ]
    }
    return finding_at(step, cause, severity, ranks, fields, numbers)


def _declined(declined: Mapping[str, str], step: int) -> Finding:
    unseen = {"": "it is too small to be seen beside rounding"}
    reasons = [f"{kind}: {why}" if kind else why for kind, why in (declined or unseen).items()]
    fields = {"step": f"{step:,}", "why": "; ".join(reasons)}
    return finding_at(step, "update.declined", Severity.NOTE, (), fields, {"why": fields["why"]})


def _computed(kinds: Sequence[str]) -> str:
    """Return who computes: ``AdamW computes``, ``AdamW and Muon compute``."""
    each = list(dict.fromkeys(kinds))
    return f"{listed(each)} {'computes' if len(each) == 1 else 'compute'}"


def _how(same: Sequence[OddUpdate]) -> str:
    """Return how the updates of some parameters differ, in words."""
    first = same[0]
    factor = _span([one.factor for one in same], ".3g")
    ratio = _span([one.ratio for one in same], ".3g")
    size = f"cosine {_span([one.cosine for one in same], '.2f')}, {ratio} times as large"
    along = f" along {first.axis}" if first.axis else ""
    decays = f"{_span([1 + one.factor for one in same], '.3g')} times as much"
    words = {
        UpdateMismatch.ALONE: f"each rank updates its own part{along} as if that were the whole "
        f"parameter ({size})",
        UpdateMismatch.NONE: "there is none",
        UpdateMismatch.ROWS: f"{_percent(first.factor)} of the rows are not updated",
        UpdateMismatch.SCALE: f"{factor} times as large",
        UpdateMismatch.DECAY: "the weights decay "
        + ("by another amount" if math.isnan(first.factor) else decays),
        UpdateMismatch.CHANGED: f"it has another direction ({size})",
        UpdateMismatch.MOVED: "between the forward pass and the update, the weights moved by "
        f"{factor} times the update",
        UpdateMismatch.NOT_COPIED: "the model's own copy does not follow the optimizer's",
    }[first.how]
    return f"{words}, on {name_ranks(first.ranks)}" if first.ranks else words


def _span(values: Sequence[float], form: str) -> str:
    """Return numbers as words: one, or the least and the most."""
    least = format(min(values), form)
    most = format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _resting(verdict: UpdateVerdict) -> str:
    """Return which parameters rest, in words: their update is below half an ulp."""
    if not verdict.resting:
        return ""
    most = max(share for _, share in verdict.resting)
    names = shortened([name for name, _ in verdict.resting], _MOST_NAMED)
    return (
        f" In {names}, up to {_percent(most)} of the elements with a gradient do not move: their "
        "update is below half a unit in the last place."
    )


def _unseen(verdict: UpdateVerdict) -> str:
    if not verdict.unseen:
        return ""
    return f" Rounding may hide the update of {shortened(verdict.unseen, _MOST_NAMED)}."


def _later(verdict: UpdateVerdict) -> str:
    if not verdict.later:
        return ""
    most = max(ratio for _, ratio in verdict.later)
    names = shortened([name for name, _ in verdict.later], _MOST_NAMED)
    return (
        f" After the optimizer's call, {names} changed once "
        f"more, by up to {most:.2g} times the update."
    )


class UpdateAudits(ShareDirector[UpdateShare]):
    """Audited updates of one run."""

    kind = UpdateShare

    def declined(self, why: str) -> UpdateShare:
        """Return a share that holds nothing but the reason."""
        return UpdateShare(declined={"": why})

    def judge(self, step: GatheredStep, shares: Mapping[int, UpdateShare]) -> Iterable[Finding]:
        """Judge the step's update."""
        if len(shares) < self.num_workers:
            late = self.declined("it was not asked for on all ranks in the same step")
            shares = dict.fromkeys(range(self.num_workers), late)
        shares_W = [shares[rank] for rank in range(self.num_workers)]
        return in_words(judge_update(shares_W), shares_W, step.step)


make_director = UpdateAudits
