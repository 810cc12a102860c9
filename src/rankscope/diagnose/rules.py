"""The table of causes: what each finding says, and what to check next.

Explanations are templates. Their fields come from the detector that found the evidence; a cause
has one entry for each severity that it can have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rankscope.core.finding import Severity


@dataclass(frozen=True, slots=True)
class Advice:
    """What a finding of one severity says.

    Attributes:
        explanation: What happens, as a template.
        next_check: What to look at next.
    """

    explanation: str
    next_check: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause.

    Attributes:
        title: The cause in a few words.
        advice: What to say, by severity.
    """

    title: str
    advice: Mapping[Severity, Advice]


_CHECK_SAMPLER = (
    "Check that every rank builds its DistributedSampler with the same seed and the same "
    "num_replicas, with its own rank, and calls set_epoch with the same epoch."
)

RULES: Mapping[str, Rule] = {
    "data.duplicate_batches": Rule(
        "Workers train on the same batches",
        {
            Severity.ERROR: Advice(
                "{Ranks} trained on identical batches in {steps}: the job did the work of "
                "{useful}, not of {workers}.",
                "Check that the data loader has a DistributedSampler (or shards by rank "
                "otherwise) and that rank and world size reach it; equal seeds without sharding "
                "give every rank the same batches.",
            ),
        },
    ),
    "data.overlapping_shards": Rule(
        "Workers draw each other's samples",
        {
            Severity.ERROR: Advice(
                "{Ranks} drew samples that other workers had drawn in the same epoch ({overlaps} "
                "so far), while samples that nobody had seen still arrived: the shards are not "
                "disjoint. Sampling with replacement does not explain it: it would repeat own "
                "samples as well and prefer no worker, and would look like this with a "
                "probability of at most {chance}.",
                _CHECK_SAMPLER,
            ),
            Severity.WARNING: Advice(
                "{Ranks} drew samples that other workers had drawn in the same epoch ({overlaps} "
                "so far), while samples that nobody had seen still arrived. Sampling with "
                "replacement, or data that hold the same content several times, would look like "
                "this with a probability of at most {chance}.",
                _CHECK_SAMPLER,
            ),
            Severity.NOTE: Advice(
                "{Ranks} drew samples that other workers had drawn before ({overlaps} so far, and "
                "{own} of their own samples), while samples that nobody had seen still arrived. "
                "Sampling with replacement, or data that hold the same content several "
                "times, explains this well enough.",
                "Nothing, if that is intended. " + _CHECK_SAMPLER,
            ),
        },
    ),
    "numerics.nonfinite": Rule(
        "Infinities or NaN in loss or gradient",
        {
            Severity.ERROR: Advice(
                "The {what} of {ranks} held an infinity or NaN in {steps}{applied}.",
                "Look at the batch, learning rate and precision of {ranks} at step {first}; "
                "parameters after that step may be damaged, so go back to a checkpoint before it.",
            ),
            Severity.NOTE: Advice(
                "The gradient of {ranks} held an infinity or NaN in {steps}, and the optimizer "
                "skipped every such step, as it does when a gradient scaler tries its limits.",
                "Nothing, as long as it stays rare.",
            ),
        },
    ),
}


def describe(cause: str, severity: Severity, fields: Mapping[str, object]) -> tuple[str, str]:
    """Return explanation and next check of a finding, with the fields filled in.

    Raises:
        KeyError: The table has no such cause or severity, or a field is missing.
    """
    advice = RULES[cause].advice[severity]
    return advice.explanation.format_map(fields), advice.next_check.format_map(fields)


def name_ranks(ranks: Iterable[int], *, limit: int = 6) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 0, 2 and 5–7``; long lists are cut.

    Args:
        ranks: Ranks in any order.
        limit: Runs of ranks that are named before the rest is counted.
    """
    ordered = sorted(set(ranks))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1]
    ends = [*breaks, len(ordered)] if ordered else []
    runs = [ordered[start:end] for start, end in zip([0, *breaks], ends, strict=False)]
    named = [part for run in runs for part in ([run] if len(run) > 2 else [[rank] for rank in run])]
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in named]
    if len(texts) > limit:
        others = sum(map(len, named[limit:]))
        return f"ranks {', '.join(texts[:limit])} and {count(others, 'other')}"
    listed = " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
