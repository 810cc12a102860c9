"""What ``import rankscope`` adds to ``import torch``: new processes, in turns, the difference.

Run ``python benchmarks/imports.py``. Whole processes are timed, so that the interpreter's own start
and the disk are in both.
"""

import statistics
import subprocess
import sys
import time

VARIANTS = {
    "import torch": "import torch",
    "import torch, rankscope": "import torch, rankscope",
    "import torch; rankscope.watch": "import torch, rankscope; rankscope.watch",
    "rankscope --help": "import sys; sys.argv = ['rankscope', '--help']\n"
    "from rankscope.cli.main import run\nrun()",
}
ROUNDS = 15


def seconds(code: str) -> float:
    """Return the wall time of a new process that runs some code."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Print medians, and the median difference to ``import torch`` within each round."""
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, code in VARIANTS.items():
            taken[name].append(seconds(code))
    first = taken["import torch"]
    for name, times in taken.items():
        added = statistics.median(b - a for a, b in zip(first, times, strict=True))
        print(f"{name:32} {statistics.median(times):6.2f} s  {added:+6.2f} s")


if __name__ == "__main__":
    main()
