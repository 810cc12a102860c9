"""Training scripts as others ship them, plain and under ``rankscope run``, on two real ranks.

For each script: the same lines on standard output and the same exit code, every step watched, every
recorded loss equal to the logged one to print precision, no finding above a note; and a fault (rank
1's loss counts eightfold before backward) that is found. Models are tiny and made here, and so are
the data. ``make field`` installs the packages and runs all, which takes half an hour;
``python benchmarks/field.py --only sft`` runs those whose name holds a word. Writes
``docs/field.md``.
"""

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rankscope import Run, Severity
from rankscope.core.signals import Table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "field.md"
SCRIPTS = HERE / "field_scripts"
BEGIN, END = "<!-- table: python benchmarks/field.py -->", "<!-- end of table -->"
STEPS = 24
_TRAINER = re.compile(r"'loss': '?(-?[0-9.e-]+)'?")
_OWN = re.compile(r"^loss (-?[0-9.e-]+)$", re.M)
_TIMES = re.compile(r"'(train_runtime|train_\w+_per_second|step_time)': '?[0-9.e+-]+'?")


@dataclass(frozen=True)
class Script:
    """A script and how it is called.

    Attributes:
        name: What the table calls it.
        words: Module or file, and arguments; ``{}`` is the folder of models and data.
        package: Whose script it is, or whose pattern.
        module: Whether the first word is a module.
        logged: Finds the losses that it logs.
    """

    name: str
    words: tuple[str, ...]
    package: str
    module: bool = True
    logged: re.Pattern[str] = _TRAINER


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


ALL = (
    Script("trl sft", _trl("sft", "text", max_length=64), "trl"),
    Script(
        "trl sft, 2 micro-batches",
        _trl("sft", "text", max_length=64, gradient_accumulation_steps=2),
        "trl",
    ),
    Script("trl sft --packing", _trl("sft", "text", "--packing", max_length=64), "trl"),
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
            reward_funcs="think_format_reward",
        ),
        "trl",
    ),
    *(
        _own("trainer.py", kind, micro, package="transformers", logged=_TRAINER)
        for kind in ("tokens", "device", "micro", "smooth")
        for micro in ("1", "3")
    ),
    *(_own("accelerate_loop.py", kind, package="accelerate") for kind in ("ddp", "fsdp2")),
    _own("lightning_validation.py", package="lightning"),
    _own("sentences.py", package="sentence-transformers", logged=_TRAINER),
    _own("nanogpt_loop.py", package="torch"),
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
    """Run a script on two ranks, watched if it gets a run directory."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    words = [word.replace("{}", str(folder)) for word in script.words]
    target = ["-m", *words] if script.module else words
    if fault:
        target = [str(SCRIPTS / "with_fault.py"), *target]
    if run_dir is not None:
        target = ["-m", "rankscope", "run", "--run-dir", str(run_dir), *target]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    ended = subprocess.run(
        [sys.executable, *launcher, *target],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Outcome(ended.returncode, ended.stdout, ended.stderr)


def check(script: Script, folder: Path) -> dict[str, object]:
    """Run a script plain, watched, and with a fault; return its row."""
    plain = run(script, folder)
    watched_dir, faulty_dir = folder / f"{script.name}-run", folder / f"{script.name}-fault"
    watched = run(script, folder, watched_dir)
    row: dict[str, object] = {
        "script": script.name,
        "package": f"{script.package} {_version(script.package)}",
        "exit_code": [plain.exit_code, watched.exit_code],
        "same_output": _lines(plain) == _lines(watched),
    }
    if not watched_dir.is_dir():
        return {**row, "problem": (watched.errors or watched.output)[-2000:]}
    losses = script.logged.findall(watched.output) or script.logged.findall(watched.errors)
    recorded = Run.open(watched_dir).columns(Table.STEPS, "loss_mean")["loss_mean"].tolist()
    row |= {
        "steps": [len(losses), len(recorded)],
        "apart": max(map(_apart, losses, recorded), default=float("inf")),
        "findings": _findings(watched_dir, Severity.NOTE),
    }
    run(script, folder, faulty_dir, fault=True)
    found = _findings(faulty_dir, Severity.WARNING) if faulty_dir.is_dir() else []
    return {**row, "found": found}


def is_good(row: dict[str, object]) -> bool:
    """Return whether a row keeps every promise."""
    return (
        row["exit_code"] == [0, 0]
        and row["same_output"] is True
        and "steps" in row
        and len(set(row["steps"])) == 1  # type: ignore[call-overload]
        and row["apart"] <= 1  # type: ignore[operator]
        and not any("note" not in finding for finding in row["findings"])  # type: ignore[attr-defined]
        and bool(row["found"])
    )


def _apart(logged: str, recorded: float) -> float:
    """Return how far a recorded loss is from a logged one, in half units of its last digit."""
    digits = len(logged.partition(".")[2].partition("e")[0])
    unit = 10.0**-digits * 10.0 ** float(logged.partition("e")[2] or 0)
    return abs(float(logged) - recorded) / (0.5 * unit + 2e-6 * abs(recorded))


def _findings(run_dir: Path, least: Severity) -> list[str]:
    found = Run.open(run_dir).findings()
    return [
        f"{finding.severity}: {finding.id} {list(finding.ranks)}"
        for finding in found
        if finding.severity >= least
    ]


def _lines(outcome: Outcome) -> Counter[str]:
    """Return the lines of standard output, in any order: two ranks write them."""
    return Counter(_TIMES.sub(r"'\1'", outcome.output).splitlines())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# Models and data -----------------------------------------------------------------------------


def make_assets(folder: Path) -> None:
    """Write a tiny causal model with its tokenizer, and three data sets."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [
        "a",
        "worker",
        "reads",
        "its",
        "shard",
        "and",
        "sums",
        "the",
        "loss",
        "of",
        "each",
        "token",
        "before",
        "ranks",
        "agree",
        "on",
        "it",
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
    fast = PreTrainedTokenizerFast(
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


# The page ------------------------------------------------------------------------------------


def table_of(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| script | package | steps logged, recorded | loss apart from its log | output, exit code "
        "| healthy run | rank 1's loss × 8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        same = "same" if row["same_output"] and len(set(row["exit_code"])) == 1 else "**differ**"  # type: ignore[call-overload]
        if "steps" not in row:
            lines.append(
                f"| {row['script']} | {row['package']} | **nothing** | – | {same} | – | – |"
            )
            continue
        logged, recorded = row["steps"]  # type: ignore[misc]
        apart = "less than it shows" if row["apart"] <= 1 else f"**{row['apart']:.1f} half digits**"  # type: ignore[operator]
        lines.append(
            f"| {row['script']} | {row['package']} | {logged}, {recorded} | {apart} | {same} "
            f"| {_listed(row['findings'])} | {_listed(row['found'])} |"  # type: ignore[arg-type]
        )
    return "\n".join(lines)


def _listed(findings: list[str]) -> str:
    kinds = dict.fromkeys(finding.rpartition(" [")[0] for finding in findings)
    return (
        ", ".join(f"`{kind.partition(': ')[2]}` ({kind.partition(': ')[0]})" for kind in kinds)
        or "none"
    )


def write_page(rows: list[dict[str, object]]) -> None:
    """Put the table into the page, in place of the one that is there."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table_of(rows)}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Run the scripts that were asked for; return how many do not keep their promises."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="scripts whose name holds this")
    parser.add_argument("--write", action="store_true", help="write docs/field.md")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_assets(Path(folder))
        for script in ALL:
            if asked.only in script.name:
                row = check(script, Path(folder))
                rows.append(row)
                print("good" if is_good(row) else "BAD ", json.dumps(row), flush=True)
    if asked.write:
        write_page(rows)
    return sum(not is_good(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
