"""Other frameworks' trainings at two layouts, compared as ``rankscope parity`` does.

    PYTHONPATH=tests python benchmarks/parity_frameworks.py

With ``--command`` each pair runs by the command, as a user calls it; without, ranks are forked from
a process that has imported the frameworks, which takes a quarter of the time.

What each pair must answer is written here before it runs. Scripts are in ``parity_scripts``;
torchtitan (``pip install --no-deps torchtitan==0.2.2 tyro torchdata``) is its own, started by
``field_scripts/titan.py``.
"""

import argparse
import fnmatch
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_pairs import recordings, run_here

from rankscope.tools.parity.compare import decide_resumed

HERE = Path(__file__).parent
SCRIPTS = HERE / "parity_scripts"
STEPS = 4
STEPS_RESUMED, SAVED_AT = 6, 3
PRELOADED = (
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "accelerate",
    "deepspeed",
    "lightning.pytorch",
    "trl",
)


@dataclass(frozen=True)
class Pair:
    """Two commands without their scripts' folder, and what must be answered.

    Attributes:
        name: Its name.
        a: One layout: ranks under torchrun, 0 for none, then the script and its words.
        b: The other.
        stage: The stage that must be named; empty where both are the same.
        words: A part of the headline or of a note.
        resume: B's resumption after three steps; empty without.
        same_start: Whether B begins with A's parameters, which it would draw otherwise.
    """

    name: str
    a: str
    b: str
    stage: str = ""
    words: str = ""
    resume: str = ""
    same_start: bool = False


def _titan(ranks: int, *, batch: int = 2, **parallelism: int | str) -> str:
    """Return the words of torchtitan's debug model under a kind of parallelism."""
    settings = {
        "model.hf_assets_path": "{}/model",
        "training.dataset_path": "{}/text",
        "training.seq_len": 32,
        "training.local_batch_size": batch,
        "training.steps": 12,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 2,
        "debug.seed": 1,
        **{f"parallelism.{name}": value for name, value in parallelism.items()},
    }
    return " ".join(
        [f"{ranks} titan.py", *(f"--{name} {value}" for name, value in settings.items())]
    )


_SHARDED: dict[str, Any] = {"data_parallel_shard_degree": 2}
_INTERLEAVED: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_schedule": "Interleaved1F1B",
}


def _resumed(
    name: str, layout: str, forget: str = "", stage: str = "", *, words: str = "", later: str = ""
) -> Pair:
    """Return a layout that goes on, and saves after three steps and is resumed.

    Args:
        name: The framework's, and what is forgotten.
        layout: Ranks, the script and its words.
        forget: What the resumption does not restore.
        stage: The stage that must be named.
        words: The expected part of the headline, or of a note.
        later: The layout of the resumption, if it is another one.
    """
    saving = f" --save-at {SAVED_AT}"
    resume = f"{later or layout}{saving} --resume" + f" --forget {forget}" * bool(forget)
    return Pair(name, layout, layout + saving, stage, resume=resume, words=words)


_PLAIN = "2 plain_loop.py --batch 4"
_TRAINER = "2 trainer.py --batch 4 --dropout .1"
_ACCELERATE = "2 accelerate_loop.py --batch 4 --schedule --dropout .1"
_LIGHTNING = "2 lightning_loop.py --batch 4 --workers 2"
_DCP = "2 dcp_loop.py"
_ZERO, _LEARNED = "another exp_avg before its first call", "lr is "
_REPEATED, _PERMUTED = "B repeats those of A's step 0", "to other ranks, by a permutation"

RESUMPTIONS = (
    _resumed("torch.save, float16 and DDP, resumed", _PLAIN),
    _resumed("torch.save, without the optimizer", _PLAIN, "optimizer", "optimizer state",
             words=_ZERO),
    _resumed("torch.save, without the scaler", _PLAIN, "scaler", "optimizer state",
             words="the gradient scaler is not restored: its scale is 2048.0 in A and 1024.0 in B"),
    _resumed("torch.save, without the schedule", _PLAIN, "schedule", "update", words=_LEARNED),
    _resumed("torch.save, without random states", _PLAIN, "random", "random state",
             words="rank 0 holds another one; rank 1 holds another one"),
    _resumed("torch.save, random states permuted", _PLAIN, "permuted", "random state",
             words=_PERMUTED),
    _resumed("torch.save, samples repeated", _PLAIN, "samples", "samples", words=_REPEATED),
    _resumed("torch.save, a batch skipped", _PLAIN, "batch", "samples",
             words="B skips to those of A's step 4"),
    _resumed("Trainer, resumed", "0 trainer.py"),
    _resumed("Trainer, DDP, resumed", _TRAINER),
    _resumed("Trainer, without the optimizer", _TRAINER, "optimizer", "optimizer state",
             words=_ZERO),
    _resumed("Trainer, random states permuted", _TRAINER, "permuted", "random state",
             words=_PERMUTED),
    _resumed("Trainer, samples repeated", "2 trainer.py --batch 4", "samples", "samples",
             words=_REPEATED),
    _resumed("Trainer, dropout, samples repeated, which restores no random state", _TRAINER,
             "samples", "random state", words=_REPEATED),
    _resumed("Accelerate, resumed", _ACCELERATE),
    _resumed("Accelerate, without the optimizer", _ACCELERATE, "optimizer", "optimizer state",
             words=_ZERO),
    _resumed("Accelerate, without the schedule", _ACCELERATE, "schedule", "update",
             words=_LEARNED),
    _resumed("Accelerate, random states permuted", _ACCELERATE, "permuted", "random state",
             words=_PERMUTED),
    _resumed("Accelerate, a loader that draws its seed after the states are loaded",
             f"{_ACCELERATE} --no-generator", "", "random state",
             words="rank 0 holds another one; rank 1 holds another one"),
    _resumed("Accelerate, samples repeated", _ACCELERATE, "samples", "samples", words=_REPEATED),
    _resumed("Lightning, resumed", f"{_LIGHTNING} --stateful"),
    _resumed("Lightning, without the optimizer", f"{_LIGHTNING} --stateful", "optimizer",
             "optimizer state", words=_ZERO),
    _resumed("Lightning, dropout, as it keeps no random state",
             f"{_LIGHTNING} --stateful --dropout .1", "", "random state",
             words="rank 0 holds another one; rank 1 holds another one"),
    _resumed("Lightning, a plain loader, which begins again", _LIGHTNING, "", "samples",
             words=_REPEATED),
    _resumed("DCP, FSDP2, resumed", _DCP),
    _resumed("DCP, FSDP2, resumed on four ranks", f"{_DCP} --dropout 0",
             later="4 dcp_loop.py --batch 2 --dropout 0"),
    _resumed("DCP, without the optimizer", _DCP, "optimizer", "optimizer state", words=_ZERO),
    _resumed("DCP, without the schedule", _DCP, "schedule", "update", words=_LEARNED),
    _resumed("DCP, one random state by one name", f"{_DCP} --one-for-all", "", "random state",
             words="holds that of rank"),
    _resumed("DCP, samples repeated", _DCP, "step", "samples", words=_REPEATED),
)  # fmt: skip
"""Resumptions, with what must be answered written before they ran."""

PAIRS = (
    Pair("Trainer, DDP", "0 trainer.py", "2 trainer.py --batch 4"),
    Pair("Trainer, FSDP2", "0 trainer.py", "2 trainer.py --batch 4 --fsdp"),
    Pair("Trainer, accumulation", "0 trainer.py", "0 trainer.py --batch 4 --accumulate 2"),
    Pair("Trainer, own means", "0 trainer.py", "2 trainer.py --batch 4 --own-mean", "gradient"),
    Pair("TRL SFT, DDP", "0 sft.py", "2 sft.py --batch 4"),
    Pair("TRL SFT, accumulation", "0 sft.py", "0 sft.py --batch 4 --accumulate 2"),
    Pair("Lightning, DDP", "0 lightning_loop.py", "2 lightning_loop.py --batch 4 --workers 2"),
    Pair(
        "Lightning, FSDP2",
        "0 lightning_loop.py --clip 0",
        "2 lightning_loop.py --batch 4 --workers 2 --fsdp --clip 0",
    ),
    Pair(
        "Lightning, accumulation",
        "0 lightning_loop.py",
        "0 lightning_loop.py --batch 4 --accumulate 2",
    ),
    Pair(
        "Lightning, bfloat16 autocast",
        "0 lightning_loop.py --precision bf16-mixed",
        "2 lightning_loop.py --batch 4 --workers 2 --precision bf16-mixed",
    ),
    Pair(
        "Lightning, not clipped", "0 lightning_loop.py", "0 lightning_loop.py --clip 0", "clipping"
    ),
    Pair(
        "Lightning's sampler, which shuffles",
        "0 lightning_loop.py",
        "2 lightning_loop.py --batch 4 --workers 2 --lightnings-sampler",
        "samples",
    ),
    Pair("Accelerate, DDP", "0 accelerate_loop.py", "2 accelerate_loop.py --batch 4"),
    Pair(
        "Accelerate, accumulation",
        "0 accelerate_loop.py",
        "0 accelerate_loop.py --batch 4 --accumulate 2",
    ),
    Pair("DeepSpeed, ZeRO 0", "1 deepspeed_loop.py", "2 deepspeed_loop.py --batch 4"),
    Pair("DeepSpeed, ZeRO 1", "1 deepspeed_loop.py", "2 deepspeed_loop.py --batch 4 --stage 1"),
    Pair("DeepSpeed, ZeRO 2", "1 deepspeed_loop.py", "2 deepspeed_loop.py --batch 4 --stage 2"),
    Pair("DeepSpeed, ZeRO 3", "1 deepspeed_loop.py", "2 deepspeed_loop.py --batch 4 --stage 3"),
    Pair(
        "DeepSpeed, ZeRO 1, accumulation",
        "1 deepspeed_loop.py",
        "2 deepspeed_loop.py --batch 2 --accumulate 2 --stage 1",
    ),
    Pair(
        "DeepSpeed, clipped otherwise",
        "2 deepspeed_loop.py --batch 4 --stage 1",
        "2 deepspeed_loop.py --batch 4 --stage 2 --clip 0.2",
        "gradient",
    ),
    Pair(
        "DeepSpeed, experts",
        "1 deepspeed_loop.py --clip 0 --experts 1",
        "2 deepspeed_loop.py --clip 0 --batch 4 --experts 2",
    ),
    Pair(
        "DeepSpeed, experts, ZeRO 1, four ranks",
        "1 deepspeed_loop.py --clip 0 --experts 1",
        "4 deepspeed_loop.py --clip 0 --batch 2 --experts 2 --stage 1",
    ),
    Pair(
        "DeepSpeed, experts, ZeRO 2",
        "1 deepspeed_loop.py --clip 0 --experts 1",
        "2 deepspeed_loop.py --clip 0 --batch 4 --experts 2 --stage 2",
    ),
    Pair(
        "DeepSpeed, experts, clipped, by the mean of the ranks' norms",
        "1 deepspeed_loop.py --experts 1",
        "2 deepspeed_loop.py --batch 4 --experts 2",
        "gradient",
    ),
    Pair(
        "Accelerate, a schedule with a length in updates",
        "0 accelerate_loop.py --schedule",
        "2 accelerate_loop.py --batch 4 --schedule",
        "update",
    ),
    Pair("nanoGPT's loop, DDP", "0 nanogpt_loop.py", "2 nanogpt_loop.py"),
    Pair(
        "nanoGPT's loop, accumulation",
        "0 nanogpt_loop.py --batch 16 --accumulate 1",
        "2 nanogpt_loop.py --batch 2 --accumulate 8",
    ),
    Pair("nanoGPT's loop, bfloat16", "0 nanogpt_loop.py --bf16", "2 nanogpt_loop.py --bf16"),
    Pair("Megatron-core, DDP", "1 megatron_loop.py", "2 megatron_loop.py --batch 4"),
    Pair(
        "Megatron-core, DDP, overlapped, accumulation",
        "1 megatron_loop.py",
        "2 megatron_loop.py --batch 2 --accumulate 2 --overlap",
    ),
    Pair(
        "Megatron-core, distributed optimizer",
        "1 megatron_loop.py",
        "2 megatron_loop.py --batch 4 --distributed",
    ),
    Pair(
        "Megatron-core, bfloat16",
        "1 megatron_loop.py --bf16",
        "2 megatron_loop.py --bf16 --batch 4",
    ),
    Pair(
        "Megatron-core, bfloat16, distributed optimizer",
        "1 megatron_loop.py --bf16",
        "2 megatron_loop.py --bf16 --batch 4 --distributed",
    ),
    Pair(
        "Megatron-core, a layer's gradient halved",
        "1 megatron_loop.py",
        "2 megatron_loop.py --batch 4 --distributed --fault layer_halved",
        "gradient",
    ),
    Pair(
        "Megatron-core, not divided",
        "1 megatron_loop.py --clip 0",
        "2 megatron_loop.py --batch 2 --accumulate 2 --clip 0 --fault not_divided",
        "gradient",
    ),
    Pair(
        "Megatron-core, experts",
        "1 megatron_loop.py --experts 1",
        "2 megatron_loop.py --batch 4 --experts 2",
    ),
    Pair(
        "Megatron-core, experts, distributed optimizer",
        "1 megatron_loop.py --experts 1",
        "2 megatron_loop.py --batch 4 --experts 2 --distributed",
    ),
    Pair(
        "Megatron-core, experts, four ranks, bfloat16, distributed optimizer",
        "1 megatron_loop.py --bf16 --experts 1",
        "4 megatron_loop.py --bf16 --batch 2 --experts 2 --distributed",
    ),
    Pair(
        "Megatron-core, an expert's gradient halved",
        "1 megatron_loop.py --experts 1",
        "2 megatron_loop.py --batch 4 --experts 2 --distributed --fault expert_halved",
        "gradient",
        words="experts.local_experts.3.linear_fc1.weight, × 1/2",
    ),
    Pair(
        "torchtitan, tensor parallelism",
        _titan(1),
        _titan(2, tensor_parallel_degree=2),
        same_start=True,
    ),
    Pair(
        "torchtitan, pipeline",
        _titan(1),
        _titan(2, pipeline_parallel_degree=2),
        "loss",  # a sum, whose gradient is not divided: pytorch/torchtitan#2972
        same_start=True,
    ),
    Pair(
        "torchtitan, interleaved stages",
        _titan(1, batch=4),
        _titan(2, batch=4, **_INTERLEAVED),
        "loss",
        same_start=True,
    ),
    Pair(
        "torchtitan, replicated",  # pytorch/torchtitan#2323
        _titan(2, **_SHARDED),
        _titan(2, data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
        "gradient",
        same_start=True,
    ),
    *RESUMPTIONS,
)


def layout_of(words: str, folder: Path, assets: Path) -> Any:
    """Return the layout of one side, which writes into a folder of its own."""
    ranks, script, *more = words.replace("{}", str(assets)).split()
    place = HERE / "field_scripts" if script == "titan.py" else SCRIPTS
    if script in ("trainer.py", "sft.py") or "--save-at" in more:
        more += ["--folder", str(folder)]
    return recordings.layout(int(ranks), *more, script=str(place / script))


def command_of(side: Any) -> str:
    """Return the command that runs a layout."""
    start = f"torchrun --nproc-per-node {side.ranks}" if side.ranks else sys.executable
    return " ".join([start, side.script, *side.words])


def by_command(pair: Pair, folder: Path, assets: Path) -> dict[str, Any]:
    """Return the answer of the command."""
    sides = [layout_of(words, folder / name, assets)
             for words, name in ((pair.a, "a"), (pair.b, "b"))]  # fmt: skip
    words = ["-a", command_of(sides[0]), "-b", command_of(sides[1])]
    steps = STEPS
    if pair.resume:
        resumed = layout_of(pair.resume, folder / "b", assets)
        words += ["-b2", command_of(resumed), "--resume-at", str(SAVED_AT)]
        steps = STEPS_RESUMED
    words += ["--same-start"] * pair.same_start
    command = [sys.executable, "-m", "rankscope", "parity", *words, "--steps", str(steps), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"answer": "failed", "stage": None, "headline": done.stderr[-300:]}
    return found


def forked(pair: Pair, kept: Any, folder: Path, assets: Path) -> dict[str, Any]:
    """Return the answer for ranks that are forked from this process."""
    saved = folder / re.sub(r"\W+", "-", pair.b)  # by all pairs that save in this layout
    a, b = (layout_of(words, saved, assets) for words in (pair.a, pair.b))
    try:
        if not pair.resume:
            answer = recordings.answer_of(kept, a, b, STEPS)
        else:
            answer = resumed_answer(pair, kept, a, b, saved)
    except (AssertionError, ValueError) as error:
        return {"answer": "failed", "stage": None, "headline": str(error)[-300:]}
    found: dict[str, Any] = answer.to_json()
    return found


def resumed_answer(pair: Pair, kept: Any, a: Any, b: Any, saved: Path) -> Any:
    """Return the answer for a resumption from a copy of what is saved."""

    def resume() -> Any:
        copied = Path(tempfile.mkdtemp(dir=saved.parent)) / "saved"
        shutil.copytree(saved, copied)
        later = layout_of(pair.resume, copied, copied)
        return kept.side(later, "B", STEPS_RESUMED - SAVED_AT, first_step=SAVED_AT)

    def again(side: Any, eps: float) -> Any:
        return kept.side(a, "moved", max(side.steps) + 1, eps=eps)

    side_a = kept.side(a, "A", STEPS_RESUMED)
    return decide_resumed(side_a, kept.side(b, "B", SAVED_AT), resume, again)


def run_pairs(patterns: list[str], folder: Path, *, command: bool) -> int:
    """Run the pairs of some names; return how many answers are wrong."""
    wrong = 0
    assets, records = folder / "assets", folder / "records"
    records.mkdir()
    kept = recordings.Recordings(records, run_here)
    for pair in PAIRS:
        if not any(fnmatch.fnmatch(pair.name, pattern) for pattern in patterns):
            continue
        if "{}" in pair.a and not assets.exists():
            assets.mkdir()
            importlib.import_module("field").make_assets(assets)
        begun = time.perf_counter()
        if command or pair.same_start:
            found = by_command(pair, Path(tempfile.mkdtemp(dir=folder)), assets)
        else:
            found = forked(pair, kept, folder / "output", assets)
        same = str(found["answer"]).startswith("the same")
        right = (found["stage"] or "") == pair.stage and same == (not pair.stage)
        right &= pair.words in " ".join(
            [found["headline"], found["advice"], *found.get("notes", ())]
        )
        wrong += not right
        expected = pair.stage or "the same"
        verdict = "yes" if right else "no"
        seconds = time.perf_counter() - begun
        print(
            f"| {pair.name} | {expected} | {found['headline']} | {verdict} | {seconds:.0f} |",
            flush=True,
        )
    return wrong


def main() -> None:
    """Run the pairs and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="patterns of names, separated by |")
    parser.add_argument("--command", action="store_true", help="run all pairs by the command")
    chosen = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for name in () if chosen.command else PRELOADED:
        importlib.import_module(name)
    print("| pair | expected | answer | right | seconds |\n|---|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(prefix="parity-"))  # each fork would remove a directory object
    try:
        wrong = run_pairs(chosen.only.split("|"), folder, command=chosen.command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
