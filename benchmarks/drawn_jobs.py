"""Trainings that seeds draw from some twenty choices, healthy and with one fault each, watched.

    PYTHONPATH=tests python benchmarks/drawn_jobs.py --seeds 0:100

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
from collections.abc import Iterable
from pathlib import Path

from drawn.training import draw, faults_of
from watched import Watched, preload, read_answers

run_on_ranks = importlib.import_module("support.forked_ranks").run_on_ranks
PROGRAM = Path(__file__).parent / "drawn" / "training.py"


def watch(seed: int, fault: str, ranks: int, *, keep: str = "") -> Watched:
    folder = Path(tempfile.mkdtemp(prefix="drawn-"))
    words = ["run", "--run-dir", str(folder / "run"), "--verify-at", "5", str(PROGRAM)]
    words += ["--seed", str(seed), "--fault", fault]
    try:
        code, out, err = run_on_ranks(ranks, words, folder, timeout=300.0)
        if code:
            return Watched((), (), f"exit code {code}, {(out + err).strip()[-1500:]}")
        return read_answers(folder)
    except AssertionError as error:
        return Watched((), (), str(error)[-500:])
    finally:
        if keep:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _seeds(words: str) -> Iterable[int]:
    if ":" in words:
        return range(*map(int, words.split(":")))
    return map(int, words.split(","))


def main() -> None:
    """Run the seeds and print one line for each program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:20", help="first and end, as 0:100, or 3,17")
    parser.add_argument("--only", choices=("healthy", "faults", "both"), default="both")
    parser.add_argument("--fault", help="this fault in place of one that is drawn")
    parser.add_argument("--keep", help="folder for the runs of programs with an unexpected answer")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    preload([PROGRAM])
    false, missed, count = 0, 0, 0
    for seed in _seeds(chosen.seeds):
        source = random.Random(f"fault {seed}")
        ranks = source.choice((2, 2, 3, 4))
        job = draw(seed)
        fault = chosen.fault or source.choice(faults_of(job, ranks))
        for kind in [] if chosen.only == "faults" else [""], [] if chosen.only == "healthy" else [fault]:
            for name in kind:
                begun = time.perf_counter()
                keep = f"{chosen.keep}/{seed}-{name or 'healthy'}" if chosen.keep else ""
                got = watch(seed, name, ranks, keep=keep)
                false += bool(not name and (got.serious or got.failed))
                missed += bool(name and not got.serious)
                count += 1
                print(f"{seed} | {ranks} ranks | {name or 'healthy'} | {got.words} | {time.perf_counter() - begun:.0f} s", flush=True)
                if got.failed or bool(got.serious) != bool(name):
                    print(f"    {job.words}", flush=True)
    print(f"{count} programs: {false} healthy ones with a warning, {missed} faults without one")
    sys.exit(bool(false))


if __name__ == "__main__":
    main()
