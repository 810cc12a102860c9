"""Trainings that seeds draw from some twenty choices, healthy and with one fault each, watched.

    PYTHONPATH=tests python benchmarks/drawn_jobs.py --seeds 0:100
    PYTHONPATH=tests python benchmarks/drawn_jobs.py --program frameworks --seeds 0:60
    PYTHONPATH=tests python benchmarks/drawn_jobs.py --program layouts --seeds 0:60 --bits

Nobody chose these programs: what goes together in them comes from the seed, as do the fault and the
number of ranks. A healthy one must get no warning. Ranks are forked, as in ``watched.py``.
"""

import argparse
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import drawn_training
from watched import Watched, preload, read_answers

run_on_ranks = importlib.import_module("support.forked_ranks").run_on_ranks
HERE = Path(__file__).parent
RANKS = (2, 2, 3, 4)
TIMEOUT = 300.0


def watch(
    program: str, seed: int, fault: str, worlds: Sequence[int], *, keep: str | None, bits: bool
) -> Watched:
    """Run a job's launches under ``rankscope run`` with a reference step; return what it got."""
    folder = Path(tempfile.mkdtemp(prefix="drawn-"))
    script = [str(HERE / f"drawn_{program}.py"), "--seed", str(seed), "--fault", fault]
    watched = ["run", "--run-dir", str(folder / "run"), "--verify-at", "5", *script]
    try:
        said = _launch(watched, worlds, folder)
        if bits:
            (folder / "alone").mkdir()
            alone = _launch(script, worlds, folder / "alone", script=True)
            if alone != said:
                return Watched((), (), f"{said} in place of {alone}")
        return read_answers(folder)
    except AssertionError as error:
        return Watched((), (), str(error)[-1500:])
    finally:
        if keep:
            shutil.copytree(folder, f"{keep}/{seed}-{fault or 'healthy'}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _launch(words: list[str], worlds: Sequence[int], folder: Path, **how: bool) -> list[str]:
    """Run a job's launches; return what they print at the end, with digests of parameters."""
    said: list[str] = []
    for number, ranks in enumerate(worlds):
        more = ["--launch", str(number)] if number else []
        code, out, err = run_on_ranks(ranks, [*words, *more], folder, timeout=TIMEOUT, **how)
        assert not code, f"exit code {code}, {(out + err).strip()[-1400:]}"
        assert "switched itself off" not in err, err[-1400:]
        said += [line for line in out.splitlines() if line.startswith("last loss")]
    return said


def false_of(job: Any, got: Watched) -> list[str]:
    """Return the warnings of a healthy job that are not true, or that it is not watched."""
    true = set[str]()
    if "in order" in (getattr(job, "data", ""), getattr(job, "sampler", "")):
        true.add("data.repeated_order")
    if getattr(job, "precision", "") == "bfloat16":  # small updates are less than half of a bit
        true.add("state.updates_lost")
    if getattr(job, "model", "") == "gpt2":  # Trainer counts labels that this model shifts away
        true |= {"verify.scale", "verify.weighting"}
    if getattr(job, "model", "") == "bert" and job.average_tokens_across_devices:
        true |= {"verify.scale", "loss.scale"}  # Trainer takes its mean over samples for a sum
    if getattr(job, "kind", "") == "accelerate" and len(job.worlds) > 1:
        true.add("data.resume_mismatch")  # Accelerate draws another order unless told otherwise
    alone = getattr(job, "beside", "") == "nothing"  # nobody holds what a rank holds
    unwatched = [note for note in got.notes if note == "not watched" and not alone]
    return unwatched + [cause for cause in got.serious if cause not in true]


def _drawn(program: str, seed: int, source: random.Random) -> tuple[Any, Sequence[int], list[str]]:
    """Return a seed's job, the ranks of its launches, and the faults that it can have."""
    if program == "training":
        ranks = source.choice(RANKS)
        plain = drawn_training.draw(seed)
        return plain, (ranks,), drawn_training.faults_of(plain, ranks)
    module = importlib.import_module(f"drawn_{program}")
    job = module.draw(seed)
    return job, job.worlds, module.faults_of(job)


def main() -> None:
    """Run the seeds, print one line for each program, and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--program", choices=("training", "frameworks", "layouts"), default="training"
    )
    parser.add_argument("--seeds", default="0:20", help="first and end, as 0:100, or 3,17")
    parser.add_argument("--only", choices=("healthy", "faults"))
    parser.add_argument("--fault", help="this fault in place of one that is drawn")
    parser.add_argument("--keep", help="folder for the runs")
    parser.add_argument("--bits", action="store_true", help="compare bits with a run by itself")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    preload([HERE / f"drawn_{chosen.program}.py"])
    count: Counter[str] = Counter()
    for seed in _seeds(chosen.seeds):
        source = random.Random(f"fault {seed}")
        job, worlds, faults = _drawn(chosen.program, seed, source)
        drawn = [chosen.fault or source.choice(faults)] if faults else []
        names = {"healthy": [""], "faults": drawn}.get(chosen.only, ["", *drawn])
        for name in names:
            begun = time.perf_counter()
            got = watch(chosen.program, seed, name, worlds, keep=chosen.keep, bits=chosen.bits)
            wrong = not got.serious if name else bool(false_of(job, got))
            count["fault" if name else "healthy"] += 1
            count["missed" if name else "false"] += wrong
            count["failed"] += bool(got.failed)
            seconds = f"{time.perf_counter() - begun:.0f} s"
            words = [str(seed), f"{worlds[-1]} ranks", name or "healthy", got.words, seconds]
            print(" | ".join(words), flush=True)
            if wrong or got.failed:
                print(f"    {job.words}", flush=True)
    print(
        f"{count['false']} of {count['healthy']} healthy jobs have a warning that is not true. "
        f"{count['missed']} of {count['fault']} faults have none. {count['failed']} jobs failed."
    )
    sys.exit(bool(count["false"] or count["failed"]))


def _seeds(words: str) -> Iterable[int]:
    first, colon, end = words.partition(":")
    return range(int(first), int(end)) if colon else map(int, words.split(","))


if __name__ == "__main__":
    main()
