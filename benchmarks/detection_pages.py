"""The page ``docs/detection.md``, from the results of the detection bench."""

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
_NOT_YET = "not measured"


def render(results: dict[str, Any]) -> str:
    """Return the page."""
    null, rows = results.get("null", {}), results.get("faults", {}).get("rows", [])
    parts = [
        "# Detection, measured",
        "Written by `make bench`; `python benchmarks/detection.py --quick` takes a few minutes. "
        "What is promised, and why it holds, is in [statistics](statistics.md); in plain words, "
        "[detection explained](detection-explained.md).",
        "## False alarms on healthy streams",
        *_healthy(null),
        "## Outside of the guarantee",
        *_outside(null),
        "## Faults",
        *_faults(rows),
        "## The rules of others",
        *_rules(results.get("rules", {}).get("rows", []), rows, null),
        "## Real training jobs",
        *_training(results.get("training", {}).get("rows", [])),
        "## What a step costs",
        *_cost(results.get("cost", {}).get("rows", [])),
    ]
    return "\n\n".join(parts) + "\n"


def _cost(rows: list[Row]) -> list[str]:
    if not rows:
        return [_NOT_YET]
    return [
        f"Milliseconds a step in numpy on one core, in the agent: 3 totals and "
        f"{rows[0]['groups']} groups, median of {rows[0]['steps']} steps (90 % within). What the "
        "comparison of workers remembers does not grow with the steps.",
        _table(
            ("workers", "comparison of workers", "whole diagnosis", "remembered"),
            [
                (
                    f"{row['workers']:,}",
                    f"{row['outliers_median']:.1f} ({row['outliers_p90']:.1f})",
                    f"{row['diagnosis_median']:.1f} ({row['diagnosis_p90']:.1f})",
                    f"{row['state_bytes'] / 1e6:.1f} MB",
                )
                for row in rows
            ],
        ),
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _healthy(null: Row) -> list[str]:
    if not null:
        return [_NOT_YET]
    healthy, rare, whole = null["healthy"], null["rare"], null["whole"]
    steps = healthy[0]["steps"]
    worst = max(healthy, key=lambda row: row["low"] / row["bound"])
    return [
        f"One signal, the bets of the product, {steps} steps, threshold 1,000. The bound is "
        f"{steps} / 1,000 = {healthy[0]['bound']:.2f}; the interval is the exact one of Clopper "
        "and Pearson, 95 %.",
        _table(
            ("workers", "stream", "runs", "runs with an alarm", "95 % interval", "bound"),
            [_share_row(row) for row in healthy],
        ),
        f"No interval lies above the bound: the highest lower end is {worst['low']:.3f}. The "
        "inequality behind the bound is not sharp: evidence that reaches 1,000 mostly jumps "
        "beyond it, and what it jumps is given away.",
        "At the threshold of the product, 10⁶:",
        _table(
            (
                "workers",
                "stream",
                "healthy steps in all",
                "alarms",
                "95 % interval of their expectation",
                "bound",
            ),
            [
                (
                    f"{row['workers']}",
                    row["stream"],
                    f"{row['repetitions'] * row['steps']:,}",
                    f"{row['alarms']}",
                    _interval(row["repetitions"] * row["low"], row["repetitions"] * row["high"], 1),
                    f"{row['repetitions'] * row['bound']:.0f}",
                )
                for row in rare
            ]
            + [
                (
                    "8",
                    "normal, the whole diagnosis, 3 totals and 40 groups",
                    f"{whole['steps']:,}",
                    f"{whole['alarms']}",
                    "–",
                    f"{whole['steps'] / 1e6:.2f}",
                )
            ],
        ),
    ]


def _share_row(row: Row) -> tuple[str, ...]:
    return (
        f"{row['workers']:,}",
        row["stream"],
        f"{row['repetitions']:,}",
        f"{row['share']:.3f}",
        _interval(row["low"], row["high"], 3),
        f"{row['bound']:.2f}",
    )


def _interval(low: float, high: float, digits: int) -> str:
    return f"{low:.{digits}f} – {high:.{digits}f}"


def _outside(null: Row) -> list[str]:
    if not null:
        return [_NOT_YET]
    return [
        "Nothing is broken in these jobs, and yet the workers are not exchangeable, mostly since a "
        f"worker's past tells its future. W = 8, one signal, {null['outside'][0]['steps']:,} "
        "steps, threshold 10⁶. An alarm here states a true difference between workers, which need "
        "not be a fault.",
        _table(
            ("stream", "runs", "runs with an alarm", "95 % interval", "median step of the alarm"),
            [
                (
                    row["stream"],
                    f"{row['repetitions']:,}",
                    f"{row['share']:.3f}",
                    _interval(row["low"], row["high"], 3),
                    "–" if row["median"] is None else f"{row['median']:.0f}",
                )
                for row in null["outside"]
            ],
        ),
        "What the whole diagnosis says of such jobs within 300 steps, when loss, gradient norm and "
        "direction all behave like this. Where samples are known, workers with repeated batches or "
        "batches of another size are not compared.",
        _table(
            ("stream", "findings"),
            [(name, "; ".join(says) or "nothing") for name, says in null["says"].items()],
        ),
        "Why, and what can be done: [statistics](statistics.md#what-breaks-the-assumption).",
    ]


def _faults(rows: list[Row]) -> list[str]:
    if not rows:
        return [_NOT_YET]
    return [
        "The whole diagnosis at its own threshold: loss, gradient norm and direction of 8 workers, "
        "norm and direction of 40 groups. The fault begins after 50 healthy steps if nothing else "
        "is said. Delay: steps until the first warning, the first faulty one included. Right "
        "workers: all open warnings together, up to 30 steps later, name exactly the faulty ones. "
        "Onset: median distance of the estimated first step from the true one.",
        _table(
            (
                "fault",
                "runs",
                "found",
                "median delay",
                "90 % within",
                "asked",
                "right workers",
                "findings a run",
                "alarms before",
                "onset off by",
            ),
            [_fault_row(row) for row in rows],
        ),
        *[
            f"{row['words']}: the finding is closed {row['closed']:.0f} steps (median) after that."
            for row in rows
            if row["closed"] is not None
        ],
    ]


def _fault_row(row: Row) -> tuple[str, ...]:
    return (
        row["words"],
        f"{row['repetitions']}",
        f"{100 * row['found']:.0f} %",
        _steps(row["median"]),
        _steps(row["late"]),
        "" if row["target"] is None else f"≤ {row['target']}",
        f"{100 * row['right']:.1f} %",
        f"{row['findings']:.1f}",
        f"{row['before']}",
        _steps(row["onset"]),
    )


def _rules(rows: list[Row], found: list[Row], null: Row) -> list[str]:
    if not rows:
        return [_NOT_YET]
    named = {row["words"]: row for row in found}
    faults = list(rows[0]["faults"])
    lines = [
        (
            row["rule"],
            *(f"{1000 * share:.3g}" for share in row["false"].values()),
            *(_delay(row["faults"][fault]) for fault in faults),
        )
        for row in rows
    ]
    if null and all(fault in named for fault in faults):
        rare = {row["stream"]: row for row in null["rare"]}
        shares = [f"{_per_thousand(rare[name]):.2g}" for name in rare]
        ours = [
            f"{_steps(named[fault]['median'])} ({100 * named[fault]['right']:.0f} %)"
            for fault in faults
        ]
        lines.append(("**rankscope**, one warning a fault", *shares, "≤ 0.001", *ours))
    return [
        "Losses of 3 ± 0.1 on 8 workers. Of a healthy job: steps in a thousand that are flagged "
        "(rankscope: warnings in a thousand steps, at most 0.001 by its guarantee). Of a faulty "
        "one: median steps to the first flag, and in brackets how often that names the faulty "
        "worker alone. A rule that flags healthy steps is quick by accident.",
        _table(
            ("rule", *(f"healthy: {name}" for name in rows[0]["false"]), *faults),
            lines,
        ),
        "With 8 workers no value can be more than 2.65 standard deviations from the mean (2.47 "
        "with ddof 1), so 3 σ stays silent whatever happens.",
    ]


def _per_thousand(row: Row) -> float:
    return 1000 * float(row["alarms"]) / float(row["repetitions"] * row["steps"])


def _delay(row: Row) -> str:
    if row["median"] is None:
        return "never" if row["found"] == 0 else f"in {100 * row['found']:.0f} % of runs"
    return f"{row['median']:.0f} ({100 * row['right']:.0f} %)"


def _training(rows: list[Row]) -> list[str]:
    if not rows:
        return [_NOT_YET]
    faulty = [row for row in rows if row["faulty"] is not None]
    healthy = [row for row in rows if row["faulty"] is None]
    return [
        "The study's tiny model on 8 gloo ranks, batches of 4, watched by `rankscope.watch`. One "
        "run each. Rank 5 has the fault, from the first step if nothing else is said.",
        _table(
            ("fault on rank 5", "steps", "first warning", "delay", "estimated start", "at the end"),
            [_faulty_row(row) for row in faulty],
        ),
        "Healthy jobs that look odd:",
        _table(
            ("job", "steps", "warnings and errors", "notes"),
            [_healthy_row(row) for row in healthy],
        ),
    ]


def _faulty_row(row: Row) -> tuple[str, ...]:
    if not row["alarms"]:
        return row["words"], f"{row['steps']}", "none", "–", "–", _list(row["last"])
    first = row["alarms"][0]
    return (
        row["words"],
        f"{row['steps']}",
        f"{first['cause']}, {_ranks(first['ranks'])}",
        f"{first['step'] - row['start'] + 1}",
        f"{first['first_step']}",
        _list(row["last"]),
    )


def _healthy_row(row: Row) -> tuple[str, ...]:
    notes = [event for event in row["last"] if event["severity"] == "note"]
    return row["words"], f"{row['steps']}", _list(row["alarms"]) or "none", _list(notes) or "none"


def _list(events: list[Row]) -> str:
    return "; ".join(
        f"{event['cause']} ({event['severity']}, {_ranks(event['ranks'])})" for event in events
    )


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _steps(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
