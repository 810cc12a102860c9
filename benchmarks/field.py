"""Training scripts as others ship them, plain and under ``rankscope run``, on two real ranks.

For each script: the same lines on standard output and the same exit code, every step watched, every
recorded loss equal to the logged one to print precision, no finding above a note; and a fault (rank
1's loss counts eightfold before backward) that is found. Models are tiny and made here, and so are
the data. ``make field`` installs the packages and runs all, which takes half an hour;
``python benchmarks/field.py --only sft`` runs those whose name holds a word. Writes
``docs/field.md`` if asked with ``--write``.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from tables import fill_table

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.bus.pace import VARIABLE

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "field.md"
SCRIPTS = HERE / "field_scripts"
STEPS = 24
_TRAINER = re.compile(r"'loss': '?(-?[0-9.e-]+)'?")
_OWN = re.compile(r"^loss (-?[0-9.e-]+)$", re.M)
_TITAN = re.compile(r"step: +\d+ +loss: +(-?[0-9.]+)")
_TIMES = re.compile(
    r"'(train_runtime|train_\w+_per_second|step_time)': '?[0-9.e+-]+'?"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+|tps: .*|took [0-9.]+ seconds"
)


@dataclass(frozen=True)
class Script:
    """A script and how it is called.

    Attributes:
        name: What the table calls it.
        words: Module or file, and arguments; ``{}`` is the folder of models and data.
        package: Whose script it is, or whose pattern.
        module: Whether the first word is a module.
        logged: Finds the losses that it logs.
        plan: What is declared of it, as JSON; empty for nothing.
        packages: A folder of packages of its own, in the environment; empty for none.
        true: Cause of a finding that is right: the script has that fault; empty for none.
        unseen: Steps before rankscope run knows the model: two, where it has no wrapper.
    """

    name: str
    words: tuple[str, ...]
    package: str
    module: bool = True
    logged: re.Pattern[str] = _TRAINER
    plan: str = ""
    packages: str = ""
    true: str = ""
    unseen: int = 0


def _trl(name: str, data: str, *more: str, **options: object) -> tuple[str, ...]:
    settings = {
        "model_name_or_path": "{}/model",
        "dataset_name": "{}/" + data,
        "output_dir": "{}/output",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": "false",
        "disable_tqdm": "true",
        **options,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return (f"trl.scripts.{name}", *words, "--use_cpu", *more)


def _own(name: str, *words: str, package: str, logged: re.Pattern[str] = _OWN) -> Script:
    title = " ".join((name.removesuffix(".py"), *words))
    return Script(title, (str(SCRIPTS / name), "{}", *words), package, False, logged)


def _titan(name: str, **options: object) -> Script:
    settings = {
        "model.hf_assets_path": "{}/model",
        "training.dataset_path": "{}/text",
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.steps": STEPS,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        "debug.seed": 1,
        **options,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    words += ["--metrics.disable_color_printing"]
    return Script(name, (str(SCRIPTS / "titan.py"), *words), "torchtitan", False, _TITAN)


ALL = (
    Script("trl sft", _trl("sft", "text", max_length=64), "trl"),
    Script(
        "trl sft, 2 micro-batches",
        _trl("sft", "text", max_length=64, gradient_accumulation_steps=2),
        "trl",
    ),
    Script("trl sft --packing", _trl("sft", "text", "--packing", max_length=64), "trl"),
    Script(
        "trl sft --activation_offloading",
        (
            str(SCRIPTS / "offloading.py"),
            *_trl("sft", "text", "--activation_offloading", "true", max_length=64)[1:],
        ),
        "trl",
        False,
    ),
    Script(
        "trl sft, LoRA",
        _trl("sft", "text", *("--use_peft", "--lora_target_modules", "q_proj", "v_proj")),
        "peft",
    ),
    Script("trl dpo", _trl("dpo", "pairs", max_length=64), "trl"),
    Script(
        "trl grpo",
        _trl(
            "grpo",
            "prompts",
            num_generations=2,
            max_completion_length=12,
            reward_funcs="rewards.variety",
        ),
        "trl",
    ),
    *(
        _own("trainer.py", kind, micro, package="transformers", logged=_TRAINER)
        for kind in ("tokens", "device", "micro", "smooth")
        for micro in ("1", "3")
    ),
    _own("trainer.py", "compile", "1", package="transformers", logged=_TRAINER),
    *(
        _own("trainer.py", kind, "1", package="transformers", logged=_TRAINER)
        for kind in ("checkpoint", "reentrant")
    ),
    replace(
        _own("trainer.py", "eight_bit", "1", package="torchao", logged=_TRAINER), packages="torchao"
    ),
    *(_own("accelerate_loop.py", kind, package="accelerate") for kind in ("ddp", "fsdp2")),
    replace(_own("local_sgd.py", package="accelerate"), plan='{"local_steps": 8}'),
    *(_own("deepspeed_loop.py", stage, package="deepspeed") for stage in ("1", "2", "3")),
    _own("lightning_validation.py", package="lightning"),
    _own("sentences.py", package="sentence-transformers", logged=_TRAINER),
    _own("nanogpt_loop.py", package="torch"),
    _own("offload_loop.py", package="torch"),
    _own("muon_loop.py", package="torch"),
    replace(_own("own_loop.py", package="torch"), unseen=2),
    *(_own("gan_loop.py", kind, package="torch") for kind in ("turns", "inside", "parts")),
    replace(_own("gan_loop.py", "method", package="torch"), unseen=4),
    replace(_own("sharded_optimizers.py", package="torch"), unseen=2),
    _titan("torchtitan train"),
    _titan("torchtitan train, 2 micro-batches", **{"training.global_batch_size": 8}),
    replace(
        _titan(
            "torchtitan train, replicated",
            **{
                "parallelism.data_parallel_replicate_degree": 2,
                "parallelism.data_parallel_shard_degree": 1,
            },
        ),
        true="loss.scale",  # pytorch/torchtitan#2323
    ),
    *(
        replace(_own("timm_loop.py", micro, package="timm"), packages="timm")
        for micro in ("1", "2")
    ),
    _own("dino_loop.py", package="torch"),
    _own("resnet_loop.py", package="torch"),
)
"""Every script of the table."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a script has left."""

    exit_code: int
    output: str
    errors: str


def run(
    script: Script, folder: Path, run_dir: Path | None = None, *, fault: bool = False
) -> Outcome:
    """Run a script on two ranks, watched if it gets a run directory.

    Without a fault all that runs by itself comes due in it: canaries, and reference steps.
    """
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    words = [word.replace("{}", str(folder)) for word in script.words]
    target = ["-m", *words] if script.module else words
    if fault:
        target = [str(SCRIPTS / "with_fault.py"), *target]
    if run_dir is not None:
        plan = ["--plan", script.plan] if script.plan else []
        target = ["-m", "rankscope", "run", "--run-dir", str(run_dir), *plan, *target]
    paths = [os.environ.get("PYTHONPATH", "")]
    if script.packages:
        paths.append(str(Path(sys.prefix) / script.packages))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    ended = subprocess.run(
        [sys.executable, *launcher, *target],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            VARIABLE: "0" if fault else "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Outcome(ended.returncode, ended.stdout, ended.stderr)


@dataclass(frozen=True)
class Row:
    """What came of a script.

    Attributes:
        script: Its name.
        package: Whose it is, with the version.
        exit_codes: Plain, and watched.
        same_output: Whether standard output holds the same lines.
        steps: How many losses it logged, and how many steps were recorded; None without a run.
        apart: How far a loss is from its log at most, in half units of the log's last digit.
        findings: Of the healthy run.
        found: Above a note, of the run with the fault.
        true: Cause of a finding that is right in the healthy run; empty for none.
        unseen: Steps that are not recorded, at the beginning.
        canaries: How many have run in the healthy run; none where they are declined.
    """

    script: str
    package: str
    exit_codes: tuple[int, int]
    same_output: bool
    steps: tuple[int, int] | None = None
    apart: float = math.inf
    findings: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    true: str = ""
    unseen: int = 0
    canaries: int = 0

    @property
    def same(self) -> bool:
        """Whether the script did what it does unwatched."""
        return self.same_output and self.exit_codes[0] == self.exit_codes[1]

    @property
    def good(self) -> bool:
        """Whether every promise is kept."""
        whole = self.steps is not None and self.steps[0] - self.unseen == self.steps[1] > 0
        loud = [finding for finding in self.findings if not finding.startswith("note")]
        right = loud == ([f"warning: {self.true}"] if self.true else [])
        found = bool(set(self.found) - set(loud))
        return self.same and whole and self.apart <= 1 and right and found


def check(script: Script, folder: Path) -> Row:
    """Run a script plain, watched, and with a fault; return its row."""
    plain = run(script, folder)
    if plain.exit_code:  # of itself: nothing can be held against it
        print(f"{script.name} fails unwatched, and runs again:", plain.errors[-2000:], sep="\n")
        plain = run(script, folder)
    watched_dir, faulty_dir = folder / f"{script.name}-run", folder / f"{script.name}-fault"
    watched = run(script, folder, watched_dir)
    row = Row(
        script.name,
        f"{script.package} {_version(script)}",
        (plain.exit_code, watched.exit_code),
        _lines(plain) == _lines(watched),
        true=script.true,
    )
    if not watched_dir.is_dir():
        print(watched.errors[:4000], file=sys.stderr)
        return row
    row = with_record(row, script, watched, watched_dir)
    run(script, folder, faulty_dir, fault=True)
    found = _findings(faulty_dir, Severity.WARNING) if faulty_dir.is_dir() else ()
    return replace(row, found=found)


def with_record(row: Row, script: Script, watched: Outcome, run_dir: Path) -> Row:
    """Return a row with what a watched run has logged and recorded."""
    losses = script.logged.findall(watched.output) or script.logged.findall(watched.errors)
    recorded = Run.open(run_dir).columns(Table.STEPS, "loss_mean")["loss_mean"].tolist()
    _, canary_of_TW = Run.open(run_dir).per_worker("canary_of")
    return replace(
        row,
        steps=(len(losses), len(recorded)),
        apart=max(map(_apart, losses[script.unseen :], recorded), default=math.inf),
        unseen=script.unseen,
        findings=_findings(run_dir, Severity.NOTE),
        canaries=int(np.isfinite(canary_of_TW).all(axis=1).sum()),
    )


def _apart(logged: str, recorded: float) -> float:
    """Return how far a recorded loss is from a logged one, in half units of its last digit."""
    digits = len(logged.partition(".")[2].partition("e")[0])
    unit: float = 10.0**-digits * 10.0 ** float(logged.partition("e")[2] or 0)
    return abs(float(logged) - recorded) / (0.5 * unit + 2e-6 * abs(recorded))


def _findings(run_dir: Path, least: Severity) -> tuple[str, ...]:
    found = [finding for finding in Run.open(run_dir).findings() if finding.severity >= least]
    return tuple(dict.fromkeys(f"{finding.severity}: {finding.cause}" for finding in found))


def _lines(outcome: Outcome) -> Counter[str]:
    """Return the lines of standard output, in any order: two ranks write them."""
    return Counter(_TIMES.sub(r"'\1'", outcome.output).splitlines())


def _version(script: Script) -> str:
    place = Path(sys.prefix) / script.packages
    known = distributions(name=script.package, path=[*sys.path, str(place)])
    return next((found.version for found in known), "not installed")


# Models and data -----------------------------------------------------------------------------


def make_assets(folder: Path) -> None:
    """Write a tiny causal model with its tokenizer, three data sets, and pictures."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [
        "ranks",
        "read",
        "their",
        "shards",
        "and",
        "sum",
        "the",
        "loss",
        "before",
        "they",
        "agree",
        "on",
        "one",
        "gradient",
    ]
    draw = random.Random(0)

    def sentence(shortest: int, longest: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(shortest, longest)))

    texts = [sentence(5, 40) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    pairs = [
        {"prompt": sentence(6, 6), "chosen": sentence(8, 8), "rejected": sentence(8, 8)}
        for _ in range(240)
    ]
    prompts = [{"prompt": [{"role": "user", "content": sentence(6, 6)}]} for _ in range(240)]
    for name, rows in (
        ("text", [{"text": text} for text in texts]),
        ("pairs", pairs),
        ("prompts", prompts),
    ):
        (folder / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines)
    pixels = np.random.default_rng(0)
    for label in "abcd":
        (folder / "images" / label).mkdir(parents=True)
        for number in range(24):
            picture = Image.fromarray(pixels.integers(0, 256, (72, 72, 3), dtype=np.uint8))
            picture.save(folder / "images" / label / f"{number}.png")
    shutil.copy(SCRIPTS / "rewards.py", folder)  # where the script looks for it


# The page ------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row]) -> str:
    """Return a Markdown table: scripts of one package with the same findings share a row."""
    scripts: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        found = _in_words(row.findings, Severity.NOTE) + ", and it is right" * bool(row.true)
        name = f"{row.script}: **broken**" if not row.good else row.script
        faulty = _in_words(row.found, Severity.WARNING)
        scripts.setdefault((row.package, found, faulty), []).append(name)
    kept = sum(row.good for row in rows)
    lines = [
        f"{kept} of {len(rows)} scripts keep every promise.",
        "",
        "| package | scripts | notes of the healthy run | warnings, rank 1's loss × 8 |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {package} | {'; '.join(names)} | {found} | {faulty} |"
        for (package, found, faulty), names in scripts.items()
    ]
    return "\n".join(lines)


def _in_words(findings: Sequence[str], usual: Severity) -> str:
    """Return the causes, with a severity that is not the usual one."""
    split = [finding.partition(": ") for finding in findings]
    words = (
        f"`{cause}`" + f" ({severity})" * (severity != str(usual)) for severity, _, cause in split
    )
    return ", ".join(words) or "–"


def main() -> int:
    """Run the scripts that were asked for; return how many do not keep their promises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts whose name holds this")
    parser.add_argument("--write", action="store_true", help="write docs/field.md")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_assets(Path(folder))
        for script in ALL:
            if asked.only in script.name:
                rows.append(check(script, Path(folder)))
                print("good" if rows[-1].good else "BAD ", rows[-1], flush=True)
    if asked.write:
        fill_table(PAGE, "python benchmarks/field.py", table_of(rows))
    return sum(not row.good for row in rows)


if __name__ == "__main__":
    sys.exit(main())
