"""``rankscope diff`` on pairs of real runs whose difference is known: is the class right?

Trains a small language model with AdamW on real gloo ranks, in many variants, over several seeds;
compares each pair twice, with traces and without; and holds class and first step against what was
done to the run, and against digests that the training itself wrote of every tensor. The
expectations stand in ``pairs_of`` and were written before the first run, but for two that the
digests of the training itself refuted: DDP's first step after a restart adds up in other buckets,
so that a resumed run differs by rounding; and what is flipped on another rank than 0 after the
optimizer's step acts in the next step only.

    python benchmarks/diff_pairs.py --seeds 3 --output results.json
"""

import argparse
import json
import shutil
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from diff_training import Flip, Variant, flipped_parameter, train_variants
from harness import run_ranks

from rankscope.record import Run
from rankscope.tools.diff import Comparison, DiffClass, compare_runs

BITS = ((10, 22), (14, 26), (18, 30))
"""Bits that are flipped, by seed: from a 2^-13th of an element to the top of its exponent."""

WIDTH = 4
Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two variants, and what a comparison must say of them.

    Attributes:
        name: What was done to B, in the table.
        a: Directory of run A.
        b: Directory of run B.
        kind: The right class.
        step: The first step in which it must part, where the variant fixes it; else None: what the
            training's own digests say.
        tensor: The tensor that must be named; empty where none is looked for.
        truth_b: The variant that wrote run B's digests, if its directory has another name.
    """

    name: str
    a: str
    b: str
    kind: DiffClass
    step: int | None = None
    tensor: str = ""
    truth_b: str = ""


def variants_of(seed: int) -> dict[int, list[Variant]]:
    """Return the runs to train for one seed, by number of workers."""
    base = Variant("base", seed=seed)
    still = base.but("still", dropout=0.0)
    at = flip_step(seed)
    flips = [
        base.but(f"flip-{where}-{who}-{bit}", flip=Flip(at, bit, where, ranks, 11 * seed + bit))
        for bit in bits_of(seed)
        for where in ("parameter", "reduced")
        for who, ranks in (("one", (0,)), ("all", None))
    ]
    flips += [
        base.but(f"flip-forward-other-{bit}", flip=Flip(at, bit, "forward", (2,), seed + bit))
        for bit in bits_of(seed)
    ]
    ordered = base.but("ordered", reduction="gathered", order=(0, 1, 2, 3))
    four = [
        base,
        base.but("again"),
        base.but("buckets", bucket_mb=0.02),
        ordered,
        ordered.but("arrival", order=(2, 0, 3, 1)),
        still,
        base.but("hook", compress=True),
        base.but("bf16", dtype="bfloat16"),
        base.but("autocast", autocast=True),
        base.but("init", init_seed=seed + 100),
        base.but("dropout", dropout_seed=seed + 100),
        base.but("data", order_seed=seed + 100),
        base.but("data-later", order_seed=seed + 100, order_from=6),
        base.but("lr", lr=1.1e-3),
        base.but("lr-later", lr=1.1e-3, lr_from=6),
        base.but("swap", deal_to=(0, 2, 1, 3)),
        base.but("swap-later", deal=6, deal_to=(3, 1, 2, 0)),
        base.but("same-shard", deal_to=(0, 0, 2, 3)),
        base.but("part", stop=5),
        base.but("no-rng", resume="part", restore_random=False),
        base.but("no-optimizer", resume="part", restore_optimizer=False),
        base.but("all-restored", resume="part"),
        ordered.but("ordered-part", stop=5),
        ordered.but("ordered-restored", resume="ordered-part"),
        *flips,
    ]
    return {WIDTH: four, 2: [still.but("two")], 8: [still.but("eight")]}


def bits_of(seed: int) -> tuple[int, ...]:
    """Return the bits that are flipped."""
    return BITS[seed % len(BITS)]


def flip_step(seed: int) -> int:
    """Return the step in which bits are flipped."""
    return 4 + seed % 4


def pairs_of(seed: int) -> list[Pair]:
    """Return the pairs of one seed, and what is expected of each."""
    at = flip_step(seed)
    pairs = [
        Pair("same run twice", "base", "again", DiffClass.IDENTICAL),
        Pair(
            "resumed with all state, fixed order", "ordered", "ordered-part-2",
            DiffClass.IDENTICAL, truth_b="ordered-restored",
        ),
        Pair("other order: bucket size", "base", "buckets", DiffClass.ROUNDING),
        Pair("other order: arrival", "ordered", "arrival", DiffClass.ROUNDING, 0),
        Pair("other W: 2 instead of 4", "still", "two", DiffClass.ROUNDING, 0),
        Pair("other W: 8 instead of 4", "still", "eight", DiffClass.ROUNDING, 0),
        Pair("other dtype: gradients travel in bf16", "base", "hook", DiffClass.ROUNDING, 0),
        Pair("other dtype: bf16 parameters", "base", "bf16", DiffClass.ROUNDING, 0),
        Pair("other dtype: bf16 autocast", "base", "autocast", DiffClass.ROUNDING, 0),
        Pair("other seed: initialisation", "base", "init", DiffClass.STATE, 0),
        Pair("other seed: dropout", "base", "dropout", DiffClass.STATE, 0),
        Pair("other data order", "base", "data", DiffClass.DATA, 0),
        Pair("other data order from step 6", "base", "data-later", DiffClass.DATA, 6),
        Pair("other learning rate", "base", "lr", DiffClass.CONFIGURATION, 0),
        Pair("other learning rate from step 6", "base", "lr-later", DiffClass.CONFIGURATION, 6),
        Pair("two shards exchanged", "base", "swap", DiffClass.DATA, 0),
        Pair("two shards exchanged from step 6", "base", "swap-later", DiffClass.DATA, 6),
        Pair("one worker reads another's shard", "base", "same-shard", DiffClass.DATA, 0),
        Pair(
            "resumed with all state, DDP's own buckets", "base", "part-4", DiffClass.ROUNDING, 5,
            truth_b="all-restored",
        ),
        Pair("resumed without RNG", "base", "part-2", DiffClass.STATE, 5, truth_b="no-rng"),
        Pair(
            "resumed without optimizer", "base", "part-3", DiffClass.STATE, 5,
            truth_b="no-optimizer",
        ),
    ]  # fmt: skip
    for bit in bits_of(seed):
        for who, words in (("one", "rank 0"), ("all", "all ranks")):
            tensor = flipped_parameter(Flip(at, bit, seed=11 * seed + bit))
            pairs.append(
                Pair(f"one bit of a parameter, {words}", "base", f"flip-parameter-{who}-{bit}",
                     DiffClass.JUMP, at, tensor)
            )  # fmt: skip
            pairs.append(
                Pair(f"one bit of a reduced gradient, {words}", "base", f"flip-reduced-{who}-{bit}",
                     DiffClass.JUMP, at, "?")
            )  # fmt: skip
        tensor = flipped_parameter(Flip(at, bit, seed=seed + bit))
        pairs.append(
            Pair("one bit of a parameter, rank 2, forward", "base", f"flip-forward-other-{bit}",
                 DiffClass.JUMP, at, tensor)
        )  # fmt: skip
    return pairs


def measure(seed: int, root: Path) -> list[Row]:
    """Train the runs of one seed and compare all pairs, with traces and without."""
    for width, variants in variants_of(seed).items():
        run_ranks(partial(_work, str(root), variants), width)
    rows = []
    for traced in (True, False):
        if not traced:
            for folder in root.glob("*/traces"):
                shutil.rmtree(folder)
        rows += [_row(pair, root, seed, traced=traced) for pair in pairs_of(seed)]
    return rows


def _work(root: str, variants: list[Variant]) -> None:
    train_variants(dist.get_rank(), root, variants)


def _row(pair: Pair, root: Path, seed: int, *, traced: bool) -> Row:
    found = compare_runs(Run.open(root / pair.a), Run.open(root / pair.b))
    truth, tensors = _truth(root, pair.a, pair.truth_b or pair.b)
    expected = truth if pair.step is None else pair.step
    step = None if found.parting is None else found.parting.step
    wanted = tensors if pair.tensor == "?" else [pair.tensor]
    return {
        **asdict(pair),
        "seed": seed,
        "traces": traced,
        "found": str(found.kind),
        "right_class": found.kind is pair.kind,
        "first_step": expected,
        "true_step": truth,
        "found_step": step,
        "right_step": step == expected,
        "right_tensor": None if not pair.tensor else _tensor_of(found) in wanted,
        "found_tensor": _tensor_of(found),
        "relative": None if found.parting is None else found.parting.relative,
    }


def _tensor_of(found: Comparison) -> str:
    return "" if found.parting is None else found.parting.tensor


def _truth(root: Path, a: str, b: str) -> tuple[int | None, list[str]]:
    """Return the first step in which any bit differs, and which tensors do, as the training saw."""
    files = [sorted(root.glob(f"{name}-truth-*.json")) for name in (a, b)]
    same_width = len(files[0]) == len(files[1])
    pairs = list(zip(*files, strict=False))[: None if same_width else 1]
    first: dict[int, set[str]] = defaultdict(set)
    for one, other in pairs:
        left, right = json.loads(one.read_text()), json.loads(other.read_text())
        for step in sorted(left.keys() & right.keys(), key=int):
            names = [name for name in left[step] if left[step][name] != right[step][name]]
            if not same_width:  # the same global batch, dealt to others
                names = [name for name in names if name not in ("data", "random")]
            first[int(step)] |= set(names)
    steps = [step for step, names in sorted(first.items()) if names]
    if not steps:
        return None, []
    return steps[0], sorted({name.split(" ")[-1] for name in first[steps[0]]})


def table(rows: list[Row]) -> str:
    """Return the results as Markdown: how often each was right, of how many."""
    lines = [
        "| pair | class | class right | first step exact | tensor right | without traces: class "
        "| step | tensor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = dict.fromkeys(row["name"] for row in rows)
    for name in names:
        own = [row for row in rows if row["name"] == name]
        lines.append(f"| {name} | *{own[0]['kind']}* | {' | '.join(_scores(own))} |")
    lines.append(f"| **all** | | {' | '.join(_scores(rows))} |")
    return "\n".join(lines)


def _scores(rows: list[Row]) -> list[str]:
    scores = []
    for traced in (True, False):
        for what in ("right_class", "right_step", "right_tensor"):
            known = [r[what] for r in rows if r["traces"] is traced and r[what] is not None]
            scores.append(f"{sum(known)} of {len(known)}" if known else "–")
    return scores


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    options = parser.parse_args()
    rows: list[Row] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) if options.keep is None else options.keep / str(seed)
            root.mkdir(parents=True, exist_ok=True)
            rows += measure(seed, root)
        if options.output is not None:
            options.output.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    print(table(rows))
    for row in rows:
        if not row["right_class"] or not row["right_step"]:
            print(json.dumps({k: str(v) for k, v in row.items()}))


if __name__ == "__main__":
    main()
