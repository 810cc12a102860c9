"""Pairs of layouts, healthy and faulty, compared as ``rankscope parity`` does: what is answered.

    PYTHONPATH=tests python benchmarks/parity_pairs.py --write docs/parity.json

What each faulty pair must answer is written here before it runs: the stage, and the parameters.
"""

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

forked_ranks = importlib.import_module("support.forked_ranks")
recordings = importlib.import_module("support.parity")
layout = recordings.layout

ALL = "*"
KINDS = ("gradient", "update")
OF_PARAMETERS = ("gradient", "clipping", "update")
"""Stages in which all parameters are at fault where a pair names none."""
PRELOADED = ("torch.distributed.tensor.parallel", "torch._dynamo", "torch.distributed.fsdp")


@dataclass(frozen=True)
class Pair:
    """Two layouts and what must be answered.

    Attributes:
        name: Its name.
        a: One layout.
        b: The other.
        stage: The stage that must be named; empty for a healthy pair.
        parameters: A pattern that all parameters in the answer must match, at least one there.
        no_dropout: Whether dropout is switched off in both.
        rules: Names of A's parameters, and B's names of their parts, or none.
        report: The public report that it re-creates.
    """

    name: str
    a: Any
    b: Any
    stage: str = ""
    parameters: str = ALL
    no_dropout: bool = False
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    report: str = ""

    def fits(self, pattern: str) -> bool:
        """Return whether its name fits a pattern."""
        return fnmatch.fnmatch(self.name, pattern)


_PROJECTIONS = tuple(f"layers.*.{letter}_proj.weight" for letter in "qkv")
SPLIT = (("layers.*.qkv.weight", _PROJECTIONS),)


TIED = (("embed.weight", ("head.weight",)),)


def _healthy(seed: int) -> list[Pair]:
    more = ("--seed", str(seed))
    drop = "--dropout .1"

    def pair(name: str, a: tuple[int, str], b: tuple[int, str], **options: Any) -> Pair:
        one, two = (layout(ranks, *words.split(), *more) for ranks, words in (a, b))
        return Pair(f"{name}, seed {seed}", one, two, **options)

    return [
        pair("1 and 2 workers, DDP", (1, ""), (2, "--layout ddp")),
        pair("DDP and FSDP2", (2, "--layout ddp"), (2, "--layout fsdp2")),
        pair("accumulation 1 and 2", (1, ""), (1, "--accumulate 2")),
        pair("accumulation 1 and 4", (1, ""), (1, "--accumulate 4")),
        pair("tensor parallelism 1 and 2", (1, ""), (2, "--layout tp")),
        pair("1 worker and FSDP2, clipped", (1, "--clip .3"), (2, "--layout fsdp2 --clip .3")),
        pair("1 worker and HSDP 2 × 2", (1, ""), (4, "--layout hsdp")),
        pair("1 worker and FSDP2 × TP", (1, ""), (4, "--layout fsdp2_tp")),
        pair("1 and 4 workers, DDP", (1, ""), (4, "--layout ddp")),
        pair("DDP × accumulation", (1, ""), (2, "--layout ddp --accumulate 2")),
        pair("SGD with momentum", (1, "--optimizer sgd"), (2, "--layout ddp --optimizer sgd")),
        pair("Muon and FSDP2", (1, "--optimizer muon"), (2, "--layout fsdp2 --optimizer muon")),
        pair("bfloat16 in both", (1, "--bf16"), (2, "--layout ddp --bf16")),
        pair("autocast in both", (1, "--autocast"), (2, "--layout ddp --autocast")),
        pair("float32 and autocast", (1, ""), (2, "--layout ddp --autocast")),
        pair("float32 and mixed FSDP2", (1, ""), (2, "--layout fsdp2 --mixed")),
        pair("uneven lengths", (1, "--uneven"), (2, "--layout ddp --uneven")),
        pair("ZeRO 1", (1, "--zero"), (2, "--layout ddp --zero")),
        pair("compiled", (1, ""), (1, "--compile")),
        pair("dropout, off", (1, drop), (2, f"--layout ddp {drop}"), no_dropout=True),
        pair("1 and 8 workers, DDP", (1, ""), (8, "--layout ddp")),
        pair("bfloat16 and float32", (1, "--bf16"), (2, "--layout ddp")),
        pair("uneven lengths, FSDP2", (1, "--uneven"), (2, "--layout fsdp2 --uneven")),
        pair("uneven lengths, HSDP", (1, "--uneven"), (4, "--layout hsdp --uneven")),
        pair("pipeline 1 and 2", (1, ""), (2, "--layout pp")),
        pair("pipeline of 4 micro-batches", (1, ""), (2, "--layout pp --micro-batches 4")),
        pair("pipeline × FSDP2", (1, ""), (4, "--layout pp_fsdp2")),
        pair("pipeline of interleaved stages", (1, ""), (2, "--layout pp_interleaved")),
        pair("fused and split projections", (1, "--fused"), (2, "--layout ddp"), rules=SPLIT),
        pair("fused and split, FSDP2", (1, "--fused"), (2, "--layout fsdp2"), rules=SPLIT),
        pair("tied weights, pipeline", (1, "--tied"), (2, "--layout pp --tied"), rules=TIED),
        pair("a teacher, accumulation", (1, "--teacher"), (1, "--teacher --accumulate 4")),
        pair("experts 1 and 2", (1, "--experts"), (2, "--layout ep --experts")),
        pair("experts 1 and 4", (1, "--experts"), (4, "--layout ep --experts")),
        pair("experts of one name 1 and 2", (1, "--experts"), (2, "--layout ep_local --experts")),
        pair("experts of one name 1 and 4", (1, "--experts"), (4, "--layout ep_local --experts")),
    ]  # fmt: skip


_NORMS = "*norm*.weight"
_LAYER = "layers.1.up.weight"


def _faulty() -> list[Pair]:
    def pair(
        fault: str,
        stage: str,
        parameters: str = ALL,
        b: str = "--layout ddp",
        a: str = "",
        ranks: int = 2,
        report: str = "",
        **options: Any,
    ) -> Pair:
        sides = layout(1, *a.split()), layout(ranks, *b.split(), "--fault", fault)
        words = f"{a} {b}".split()
        marks = {
            "--autocast": "autocast",
            "--bf16": "bf16",
            "pp": "pipeline",
            "pp_interleaved": "interleaved",
            "ep_local": "one name",
        }
        kind = next((f", {mark}" for word, mark in marks.items() if word in words), "")
        return Pair(f"{fault}{kind}", *sides, stage, parameters, report=report, **options)

    two, clip, muon = "--layout ddp", "--clip .3", "--optimizer muon"
    return [
        pair("loss_times_workers", "gradient"),
        pair("loss_not_divided", "gradient", b="--accumulate 2", ranks=1, report="Automodel#3830"),
        pair("accumulator_reset", "gradient", b=f"{two} --accumulate 2", report="Automodel#3530"),
        pair("no_sync_always", "gradient"),
        pair("local_clip", "clipping", b=f"--layout fsdp2 {clip}", a=clip, report="AReaL#312"),
        pair("clip_twice", "clipping", ALL, f"--layout hsdp {clip}", clip, 4, "VeOmni#184"),
        pair("clip_leaves_out", "clipping", b=f"{two} {clip}", a=clip, report="Megatron-LM#7530"),
        pair("counter_ahead", "optimizer state", report="Megatron-LM#5974"),
        pair("moments_bf16", "update", report="AReaL#1292"),
        pair("muon_on_shards", "update", "*.weight", f"--layout fsdp2 {muon}", muon,
             report="DeepSpeed#8437"),
        pair("layer_update", "update", _LAYER),
        pair("layer_frozen", "update", _LAYER),
        pair("layer_gradient", "gradient", _LAYER),
        pair("layer_gradient_zero", "gradient", _LAYER),
        pair("sign", "gradient", _LAYER),
        pair("half_shard", "gradient", _LAYER),
        pair("stale", "gradient"),
        pair("weight_decay", "update", _NORMS),
        pair("learning_rate", "update"),
        pair("other_samples", "samples"),
        pair("same_samples", "samples"),
        pair("shifted_epoch", "samples"),
        pair("labels_shifted", "label tokens", report="transformers#48491"),
        pair("labels_random", "label tokens"),
        pair("other_start", "start"),
        pair("one_layer_start", "start", _LAYER),
        pair("replica_start", "start", _LAYER, report="OLMo-core#319"),
        pair("token_mean", "loss", b=f"{two} --uneven", a="--uneven"),
        pair("epsilon", "loss"),
        pair("attention_scale", "loss"),
        pair("keys_gradient", "gradient", "layers.1.qkv.weight", a="--fused", rules=SPLIT),
        pair("experts_not_divided", "gradient", "experts.experts", "--layout ep --experts",
             "--experts", report="pytorch#160285"),
        pair("experts_not_divided", "gradient", "experts.experts", "--layout ep_local --experts",
             "--experts"),
        pair("layer_update", "update", _LAYER, "--layout pp"),
        pair("layer_gradient", "gradient", _LAYER, "--layout pp_interleaved"),
        pair("half_mesh", "gradient", ALL, "--layout hsdp", "", 4, "Automodel#3135"),
        pair("sum_over_tokens", "gradient", b="--layout pp", report="torchtitan#2972"),
        pair("tied_apart", "gradient", "embed.weight", "--layout pp --tied", "--tied",
             report="Megatron-LM#656", rules=TIED),
        pair("smoothing_of_part", "loss", b=f"{two} --smoothing .1", a="--smoothing .1",
             report="Megatron-LM#7464"),
        pair("sharded_twice", "samples", report="accelerate#3547"),
        pair("router_gradient", "gradient", "experts.router.weight", "--layout ep --experts",
             "--experts", report="Megatron-LM#3672"),
        pair("teacher_each_pass", "start", "teacher.weight", "--teacher --accumulate 4",
             "--teacher", 1, "lightly-train#968"),
        pair("loss_times_workers", "gradient", b=f"{two} --autocast", a="--autocast"),
        pair("layer_gradient", "gradient", _LAYER, f"{two} --autocast", "--autocast"),
        pair("learning_rate", "update", b=f"{two} --bf16", a="--bf16"),
        pair("layer_update", "update", _LAYER, f"{two} --bf16", "--bf16"),
        pair("clip_leaves_out", "clipping", b=f"{two} --bf16 {clip}", a=f"--bf16 {clip}"),
    ]  # fmt: skip


def run_here(
    lead: Callable[..., None], given: Sequence[object], timeout: float
) -> tuple[int, str, str]:
    """Fork ranks from this process, which has imported torch."""
    printed = tempfile.mkdtemp()  # a temporary directory object would be removed by each fork
    try:
        process = multiprocessing.get_context("fork").Process(
            target=forked_ranks._lead, args=(lead, given, printed)
        )
        process.start()
        process.join(timeout)
        hangs = process.is_alive()
        if hangs and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        out, err = (Path(printed, name).read_text() for name in ("out", "err"))
    finally:
        shutil.rmtree(printed, ignore_errors=True)
    assert not hangs, f"it hangs; it said: {err[-300:]}"
    return process.exitcode or 0, out, err


def judge(pair: Pair, answer: dict[str, object]) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if not pair.stage:
        return "" if answer["answer"] == "the same within rounding" else "a false alarm"
    if answer["answer"] != "not the same":
        return "missed"
    if answer["stage"] != pair.stage:
        return f"at the stage {answer['stage']}, not {pair.stage}"
    names = [each["name"] for each in answer["parameters"]]  # type: ignore[attr-defined]
    if pair.parameters != ALL and not (
        names and all(fnmatch.fnmatch(n, pair.parameters) for n in names)
    ):
        return f"of other parameters: {', '.join(names[:3])}"
    return ""


def names_right(pair: Pair, answer: Mapping[str, Any]) -> bool | None:
    """Return whether an answer names the right parameters; None where no tensors are at fault."""
    if pair.stage not in OF_PARAMETERS and pair.parameters == ALL:
        return None
    names = [each["name"] for each in answer.get("parameters", ())]
    if pair.parameters == ALL:
        return bool(names) and len(names) == answer["compared"]
    return bool(names) and all(fnmatch.fnmatch(name, pair.parameters) for name in names)


def counts(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many faults were found, at which stage, and with which parameters."""
    faulty = [one for one in known.values() if one["expected"] != "the same"]
    named = [one["names_right"] for one in faulty if one["names_right"] is not None]
    found = sum(one["answer"] == "not the same" for one in faulty)
    staged = sum(one["stage"] == one["expected"] for one in faulty)
    return (
        f"of {len(faulty)} faults {found} found, {staged} at the expected stage; of "
        f"{len(named)} in tensors {sum(named)} with exactly the expected parameters"
    )


def table(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the answers as tables in Markdown: healthy pairs over all seeds, then faults."""
    healthy: dict[str, list[Mapping[str, Any]]] = {}
    for name, one in known.items():
        if one["expected"] == "the same":
            healthy.setdefault(name.rpartition(", seed")[0], []).append(one)
    lines = [
        "| healthy pair | the same | distance over bound, at most | could miss: gradient, update |",
        "|---|---|---|---|",
    ]
    for name, each in healthy.items():
        right = sum(one["right"] for one in each)
        largest = max(one["largest"] for one in each)
        missed = [max(one["could_miss"][k]["median"] for one in each) for k in KINDS]
        shown = ", ".join(f"{one:.1g}" for one in missed)
        lines.append(f"| {name} | {right} of {len(each)} | {largest:.2g} | {shown} |")
    lines += ["", f"{counts(known)[0].upper()}{counts(known)[1:]}.", ""]
    lines += ["| fault | report | expected | answer |", "|---|---|---|---|"]
    for name, one in known.items():
        if one["expected"] != "the same":
            wrong = "" if one["right"] else " **wrong**"
            row = (f"`{name}`", one["report"], one["expected"], one["headline"] + wrong)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Run pairs and print what is answered."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="*", help="patterns of names, separated by |")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", type=Path, help="JSON file; pairs of other names in it stay")
    parser.add_argument("--table", type=Path, help="print what such a file holds as Markdown")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    for name in PRELOADED:
        importlib.import_module(name)
    pairs = [each for seed in range(args.seeds) for each in _healthy(seed)] + _faulty()
    chosen = [each for each in pairs if any(map(each.fits, args.only.split("|")))]
    folder = Path(tempfile.mkdtemp(prefix="parity-pairs-"))
    known = json.loads(args.write.read_text()) if args.write and args.write.exists() else {}
    wrong = 0
    try:
        kept = recordings.Recordings(folder, run_here)
        for pair in chosen:
            begun = time.perf_counter()
            try:
                answer = recordings.answer_of(
                    kept,
                    pair.a,
                    pair.b,
                    args.steps,
                    rules_b=pair.rules,
                    no_dropout=pair.no_dropout,
                ).to_json()
            except (AssertionError, ValueError) as error:
                answer = {"answer": "failed", "headline": str(error)[-300:], "stage": None}
            problem = judge(pair, answer)
            wrong += bool(problem)
            seconds = time.perf_counter() - begun
            print(f"{'WRONG' if problem else 'right'}  {pair.name} ({seconds:.0f} s): "
                  f"{answer['headline']} {problem}", flush=True)  # fmt: skip
            curves = [one for each in answer.get("curves", {}).values() for one in each if one]
            known[pair.name] = {
                "expected": pair.stage or "the same",
                "parameters": pair.parameters if pair.stage else "",
                "report": pair.report,
                "answer": answer["answer"],
                "stage": answer["stage"],
                "headline": answer["headline"],
                "right": not problem,
                "names_right": names_right(pair, answer) if pair.stage else None,
                "largest": float(f"{max(curves, default=0.0):.3g}"),
                "could_miss": answer.get("could_miss", {}),
            }
            if args.write:
                args.write.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} right; {counts(known)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
