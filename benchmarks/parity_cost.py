"""What ``rankscope parity`` costs, over the two plain trainings: time, CPU time, and memory.

    python benchmarks/parity_cost.py --rounds 3
    python benchmarks/parity_cost.py --memory

A transformer of 10 million parameters, 1 against 4 workers, 5 steps. Memory: one of 10 and one of
100 million parameters, 1 against 2 workers, 3 steps.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
PARITY = [sys.executable, "-m", "rankscope", "parity"]
SCRIPT = Path(__file__).parent / "parity_scripts" / "larger.py"


def spent(command: list[str]) -> tuple[float, float]:
    """Run a command; return the seconds it took, and its CPU seconds with all it started."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begun, cpu


LAYOUTS = ((320, "DDP"), (320, "FSDP2"), (1120, "DDP"), (1120, "FSDP2"))
"""Widths of the model, and what two workers do."""


def measure_memory(width: int, layout: str) -> None:
    """Print how much the largest process of each side grows when it is recorded.

    A plain training that imports the same modules shows what of this they are.
    """
    words = [str(SCRIPT), "--width", str(width), "--batch"]
    more = ["--fsdp"] * (layout == "FSDP2")
    one, two = [sys.executable, *words, "4"], [*TORCHRUN, "2", *words, "2", *more]
    peaks = []
    for way in ("plain", "modules", "recorded"):
        with tempfile.TemporaryDirectory(prefix="parity-cost-") as folder:
            sides = [[*side, "--peaks", folder] for side in (one, two)]
            if way == "recorded":
                joined = [" ".join(side) for side in sides]
                spent([*PARITY, "-a", joined[0], "-b", joined[1], "--steps", "3"])
            else:
                for side in sides:
                    spent([*side, "--steps", "3", *["--modules"] * (way == "modules")])
            found = [
                [int(file.read_text()) for file in Path(folder).glob(f"{world}-*")]
                for world in (1, 2)
            ]
            peaks.append([max(each) for each in found])
    parameters = 4 * (2 * 4096 * width + 4096 + 6 * (12 * width**2 + 13 * width))
    for at, (name, size) in enumerate(
        (("1 worker", parameters), (layout, parameters // (2 if layout == "FSDP2" else 1)))
    ):
        plain, modules, own = (each[at] / 2**20 for each in peaks)
        print(
            f"{parameters / 4e6:.0f} M parameters, {name}: {plain:.0f} MiB plain, {modules:.0f} "
            f"with rankscope's modules, {own:.0f} recorded: {own - modules:+.0f} MiB beside the "
            f"modules, {(own - modules) * 2**20 / size:+.2f} copies of a rank's parameters "
            f"({size / 2**20:.0f} MiB)",
            flush=True,
        )


def main() -> None:
    """Run plain trainings and a comparison in turn; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--width", type=int, default=320, help="of the model; a multiple of 5")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    args = parser.parse_args()
    if args.memory:
        for width, layout in LAYOUTS:
            measure_memory(width, layout)
        return
    each = 16 // args.workers
    script = [str(SCRIPT), "--width", str(args.width)]
    one = [sys.executable, *script]
    many = [*TORCHRUN, str(args.workers), *script, "--batch", str(each)]
    compared = [*PARITY, "-a", " ".join(one), "-b", " ".join(many), "--steps", str(args.steps)]
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
