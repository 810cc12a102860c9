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

_DRIFT = Advice(
    "The {what} disagree {late} times as much as sampling explains in the later half of the run, "
    "and {early} times in the earlier half.",
    "Nothing, if the order or the mixture of the data changes on purpose; otherwise compare what "
    "kind of data the workers draw in both halves.",
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
    "data.worker_outlier": Rule(
        "A worker differs from the others, in its loss too",
        {
            Severity.WARNING: Advice(
                "{Ranks} {differ} from the other workers since about step {first}: {what}{where}."
                "{host}{now} A healthy run of {steps} would show anything like it with a "
                "probability of at most {bound}.",
                "Look at the batches of {ranks} from step {first} on: labels, masks, tokenizer, "
                "files. Then run one of them on another worker: what follows the batch is data, "
                "what stays with the worker is its parameters or its hardware.",
            ),
            Severity.NOTE: Advice(
                "{Ranks} differed from the other workers from about step {first} on: {what}{where}."
                "{host}{now} Since then so many workers differ that nothing tells who is at fault.",
                "See the finding that took its place.",
            ),
        },
    ),
    "compute.worker_outlier": Rule(
        "A worker's gradient differs from the others, and its loss does not",
        {
            Severity.WARNING: Advice(
                "{Ranks} {differ} from the other workers since about step {first}, with a loss "
                "like theirs: {what}{where}.{host}{now} A healthy run of {steps} would show "
                "anything like it with a probability of at most {bound}.",
                "Compare parameters, precision and library versions of {ranks} with another "
                "worker's, and run the same batch on both: a gradient that still differs is made "
                "by the worker's state or its hardware.",
            ),
            Severity.NOTE: Advice(
                "{Ranks} differed from the other workers from about step {first} on: {what}{where}."
                "{host}{now} Since then so many workers differ that nothing tells who is at fault.",
                "See the finding that took its place.",
            ),
        },
    ),
    "inconclusive": Rule(
        "Workers differ, and nothing tells who is at fault",
        {
            Severity.WARNING: Advice(
                "{Ranks} differ from each other since about step {first}: {what}{where}.{now} "
                "Among {workers} workers nothing tells which of them is at fault, or whether "
                "their data differ on purpose. A healthy run of {steps} would show anything like "
                "it with a probability of at most {bound}.",
                "Run the same batch on both: if they agree, their data differ in kind; if not, "
                "compare parameters and hardware.",
            ),
            Severity.NOTE: Advice(
                "The workers differ from each other since about step {first}; {ranks} {stand} out "
                "most: {what}{where}.{host}{now} So many differ that nothing tells who is at "
                "fault. Shards of different kinds (domains, languages, lengths) look like this.",
                "Nothing, if every worker is meant to have data of its own kind; otherwise "
                "shuffle before sharding.",
            ),
        },
    ),
    "gross-outlier": Rule(
        "A single value far out",
        {
            Severity.NOTE: Advice(
                "At step {step} the {what} of {ranks} was {z} robust standard deviations away "
                "from the other workers', farther than anything before. One step proves nothing: "
                "should it come again, a finding of its own will say so.",
                "Look at that batch, if the loss of the run jumped there too.",
            ),
        },
    ),
    "pairs-alike": Rule(
        "Workers resemble each other too much",
        {
            Severity.WARNING: Advice(
                "The gradients of {ranks} resemble each other more than those of other workers "
                "since about step {first} (cosine {above} above other pairs), though their "
                "batches are not the same.{now} A healthy run of {steps} would show anything like "
                "it with a probability of at most {bound}.",
                "Look for data or random numbers that they share: overlapping shards, the same "
                "documents, the same noise.",
            ),
            Severity.NOTE: Advice(
                "The gradients of {ranks} resemble each other more than those of other pairs "
                "since about step {first} (cosine {above}).{now} So many workers are alike in "
                "blocks that shards of different kinds explain it best.",
                "Nothing, if blocks of workers are meant to have data of their own kind.",
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
    "sampling.too_similar": Rule(
        "Workers are more alike than different data can be",
        {
            Severity.WARNING: Advice(
                "The workers are more alike than sampling explains, since about step "
                "{first}{until}: their {what} lie closer together than those of micro-batches "
                "dealt at random{ratio}. A healthy run of {steps} would show anything like it with "
                "a probability of at most {bound}.",
                "Check that the data loader shards by rank, and name the samples with "
                "scope.batch(ids): then equal batches are certain.",
            ),
            Severity.NOTE: Advice(
                "The workers are more alike than sampling explains, since about step "
                "{first}{until}, although no two of them draw the same sample: their {what} lie "
                "closer together than those of micro-batches dealt at random{ratio}.",
                "Nothing, if all workers are given the same kind or length of data at the same "
                "time; otherwise check that different samples do not hold the same content.",
            ),
        },
    ),
    "sampling.too_different": Rule(
        "The workers' data differ in kind",
        {
            Severity.NOTE: Advice(
                "The workers' data differ in kind, since about step {first}{until}: the {what} of "
                "one worker's micro-batches resemble each other more than those of other "
                "workers{ratio}.",
                "Nothing, if every worker is meant to have data of its own kind (domain, "
                "language, length); otherwise shuffle before sharding.",
            ),
        },
    ),
    "sampling.ratio": Rule(
        "The dispersion is not what sampling explains",
        {
            Severity.NOTE: Advice(
                "The workers' {what} lie {ratio} times as far apart as the spread inside their "
                "batches explains (95 % interval {low} to {high}), {reading}. Without "
                "micro-batches this is an estimate, not a proof.",
                "Compare what kind of data the workers draw, and whether they draw different ones.",
            ),
        },
    ),
    "sampling.drift": Rule(
        "The dispersion of losses drifts against what sampling explains", {Severity.NOTE: _DRIFT}
    ),
    "sampling.gradient_drift": Rule(
        "The dispersion of gradients drifts against what sampling explains",
        {Severity.NOTE: _DRIFT},
    ),
    "time.straggler": Rule(
        "Others wait for a slow worker",
        {
            Severity.NOTE: Advice(
                "{When} the gradient of {who} was ready {behind} later than the typical worker's "
                "({share} of a step), and the last in most steps. All others waited for it, "
                "{lost} in all.",
                "Compare {who} with a fast worker: data loading, load and clock rate of the "
                "processor, and work that only some ranks do, such as logging.",
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
