"""What ``rankscope parity`` costs, over the two plain trainings: time, and CPU time.

    python benchmarks/parity_cost.py --rounds 3

A transformer of 10 million parameters, 1 against 4 workers, 5 steps.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "parity_scripts" / "larger.py"


def spent(command: list[str]) -> tuple[float, float]:
    """Run a command; return the seconds it took, and its CPU seconds with all it started."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begun, cpu


def main() -> None:
    """Run plain trainings and a comparison in turn; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--width", type=int, default=320, help="of the model; a multiple of 5")
    args = parser.parse_args()
    each = 16 // args.workers
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    script = [str(SCRIPT), "--width", str(args.width)]
    one = [sys.executable, *script]
    many = [*torchrun, str(args.workers), *script, "--batch", str(each)]
    compared = [sys.executable, "-m", "rankscope", "parity", "-a", " ".join(one)]
    compared += ["-b", " ".join(many), "--steps", str(args.steps)]
    plain_steps = ["--steps", str(args.steps)]
    ratios = []
    for _ in range(args.rounds):
        plain = [spent([*command, *plain_steps]) for command in (one, many)]
        own = spent(compared)
        apart = [sum(kind) for kind in zip(*plain, strict=True)]
        ratios.append([mine / both for mine, both in zip(own, apart, strict=True)])
        print(
            f"plain {plain[0][0]:.1f} s and {plain[1][0]:.1f} s, compared {own[0]:.1f} s: "
            f"× {ratios[-1][0]:.2f}; CPU × {ratios[-1][1]:.2f}",
            flush=True,
        )
    time_ratio, cpu_ratio = (statistics.median(kind) for kind in zip(*ratios, strict=True))
    print(f"median: × {time_ratio:.2f} of the time, × {cpu_ratio:.2f} of the CPU time")


if __name__ == "__main__":
    main()
