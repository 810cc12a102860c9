"""Eight silent faults, seen by rankscope and by peers that the package index has.

The same small DDP job (``field_scripts/eight_faults.py``) trains on four gloo ranks, healthy with
two seeds and with each fault, under each tool as its documentation intends: TrainCheck learns from
one healthy run and checks the others; msprobe's training monitor raises its own alarms; AdaptDL
logs a noise scale and judges nothing. What the job costs is measured on two ranks, plain and
watched in turns. ``python benchmarks/peers.py`` makes an environment for each peer in
``.venv/peers``, runs everything, which takes two hours on two cores, and writes
``docs/comparison.md``; ``--tools msprobe`` measures one tool anew, ``--parts faults`` one part.
"""

import argparse
import csv
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from faults.catalogue import Hits, catalogue
from tables import fill_table

from rankscope import Run, Severity

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE, RESULTS = ROOT / "docs" / "comparison.md", ROOT / "docs" / "peers.json"
JOB = HERE / "field_scripts" / "eight_faults.py"
FAULTS = ("D5", "D1", "D20", "T2", "T4", "T10", "Y4", "N1")
"""Two of who reads what, one of what is read, one each of parameters, settings and buffers that
differ, one of a missing reduction, one of a faulty device."""
HIT = 1
REFERENCE_SEED, SEED, OTHER_SEED = 0, 1, 2
STEPS, REFERENCE_STEPS, TIMED_STEPS, WARM_UP, PAIRS = 120, 30, 25, 5, 2
Verdict = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A run of the job.

    Attributes:
        tool: What watches it; ``none`` for nothing.
        fault: Its id, or ``none``.
        seed: Of data and model.
        steps: How many.
        ranks: How many processes.
        width: Of the model.
    """

    tool: str
    fault: str = "none"
    seed: int = SEED
    steps: int = STEPS
    ranks: int = 4
    width: int = 32

    def environment(self, out: Path) -> dict[str, str]:
        """Return what the job reads."""
        with socket.create_server(("127.0.0.1", 0)) as place:
            port = place.getsockname()[1]
        own = {
            "TOOL": self.tool,
            "FAULT": self.fault,
            "SEED": self.seed,
            "STEPS": self.steps,
            "WIDTH": self.width,
            "OUT": out,
            "PORT": port,
            "CONFIG": out / "config.json",
        }
        return {
            **os.environ,
            **{f"PEERS_{name}": str(value) for name, value in own.items()},
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "MONITOR_OUTPUT_DIR": str(out / "monitor"),
        }

    def command(self, script: str) -> list[str]:
        """Return the launcher's words after Python's name."""
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(self.ranks), script]


def call(words: Sequence[object], **options: Any) -> None:
    """Run a command.

    Raises:
        RuntimeError: It failed; the end of its output says why.
    """
    ended = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
        **options,
    )
    if ended.returncode:
        raise RuntimeError(f"{words[0]} expected exit code 0, got:\n{ended.stdout[-1500:]}")


def median_seconds(out: Path) -> float:
    """Return the median time of a step after the first ones."""
    seconds: list[float] = json.loads((out / "seconds-0.json").read_text())
    return statistics.median(seconds[WARM_UP:])


class Tool:
    """A tool that can watch the job.

    Attributes:
        packages: What its environment holds besides torch; empty for this environment.
        title: What the table calls it.
        judges: Whether it reports faults.
    """

    packages: tuple[str, ...] = ()
    title = ""
    judges = True

    def __init__(self, name: str, environments: Path) -> None:
        self.name = name
        own = environments / name.removesuffix("-full") / "bin"
        self.bin = own if self.packages else Path(sys.executable).parent

    @property
    def python(self) -> Path:
        """Return the interpreter of its environment."""
        return self.bin / "python"

    def make_environment(self) -> None:
        """Install it, once."""
        made = self.bin.parent / "made"
        if not self.packages or made.exists():
            return
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        call([sys.executable, "-m", "venv", self.bin.parent])
        call([self.python, "-m", "pip", "install", "--quiet", torch])
        call([self.python, "-m", "pip", "install", "--quiet", torch, *self.packages])
        made.touch()

    def run(self, task: Task, out: Path) -> None:
        """Train."""
        call([self.python, *task.command(str(JOB))], env=self.environment(task, out), cwd=out)

    def environment(self, task: Task, out: Path) -> dict[str, str]:
        """Return what the job reads; a peer sees no package of another environment."""
        variables = task.environment(out)
        if self.packages:
            variables.pop("PYTHONPATH", None)
        return variables

    def prepare(self, folder: Path) -> None:
        """Do what has to be done once, before a run is judged."""

    def names(self, fault: str, out: Path) -> set[str]:
        """Return what it reports of a run, as names that mean the same in every run."""
        raise NotImplementedError

    def judge(self, fault: str, said: set[str], healthy: set[str]) -> Verdict:
        """Return what it says of a fault, beyond what it says of the healthy runs."""
        new = said - healthy
        return {"found": bool(new), "named": False, "words": f"{len(new)} new"}


class Plain(Tool):
    """Nothing that watches, in the environment of a tool."""

    def __init__(self, tool: Tool) -> None:
        self.bin, self.packages = tool.bin, tool.packages


class Rankscope(Tool):
    """rankscope as it comes, with the loss handed over."""

    title = "rankscope"

    def names(self, fault: str, out: Path) -> set[str]:
        """Return cause and ranks of each warning or error."""
        found = Run.open(out / "run").findings()
        loud = [finding for finding in found if finding.severity >= Severity.WARNING]
        return {f"{one.cause} {','.join(map(str, one.ranks))}" for one in loud}

    def judge(self, fault: str, said: set[str], healthy: set[str]) -> Verdict:
        """Tell causes and workers, and whether the catalogue expects such a cause."""
        new = [one.split(" ") for one in sorted(said - healthy)]
        causes = list(dict.fromkeys(cause for cause, _ in new))
        named = any(ranks == str(HIT) for _, ranks in new)
        words = ", ".join(f"`{cause}`" for cause in causes) or "nothing"
        if causes and not set(causes) & set(catalogue()[fault].causes):
            words += " (another cause)"
        return {"found": bool(new), "named": named, "words": words}


class TrainCheck(Tool):
    """TrainCheck: invariants from a healthy run, selective traces of the others."""

    packages = ("traincheck==0.2.0",)
    title = "TrainCheck 0.2.0, selective"
    selective = True

    def run(self, task: Task, out: Path) -> None:
        """Trace a run: all of it without invariants."""
        shutil.copy(JOB, out)
        launched = " ".join([str(self.python), *task.command(JOB.name)])
        (out / "run.sh").write_text(f"{launched}\n")
        words: list[object] = [self.bin / "traincheck-collect", "--pyscript", JOB.name]
        words += ["--shscript", "run.sh", "--models-to-track", "model"]
        words += ["--model-tracker-style", "sampler", "--output-dir", "trace"]
        if self.selective and task.seed != REFERENCE_SEED:
            words += ["--invariants", self.invariants]
        call(words, env=self.environment(task, out), cwd=out)

    def prepare(self, folder: Path) -> None:
        """Learn invariants from a healthy run."""
        self.invariants = folder / "invariants.json"
        if not self.invariants.exists():
            out = make_folder(folder / "reference")
            self.run(Task("traincheck", seed=REFERENCE_SEED, steps=REFERENCE_STEPS), out)
            infer = self.bin / "traincheck-infer"
            call([infer, "-f", out / "trace", "-o", self.invariants], cwd=out)

    def names(self, fault: str, out: Path) -> set[str]:
        """Return the invariants that a run violates."""
        check = [self.bin / "traincheck-check", "-f", out / "trace", "-i", self.invariants]
        check += ["--num-workers", "2"]
        call([*check, "--output-dir", out / "checked", "--no-html-report"], cwd=out)
        (summary,) = (out / "checked").glob("*/violations_summary.json")
        return {one["display_name"] for one in json.loads(summary.read_text())["violations"]}


class TrainCheckFull(TrainCheck):
    """TrainCheck as it traces a run to learn from."""

    title = "TrainCheck 0.2.0, full"
    selective = False

    def prepare(self, folder: Path) -> None:
        """Nothing is needed."""


class Msprobe(Tool):
    """msprobe's training monitor: norms of gradients and weights, and its alarm."""

    packages = ("mindstudio-probe==26.2.0",)
    title = "msprobe 26.2.0 monitor"
    config: ClassVar[dict[str, Any]] = {
        "targets": {},
        "wg_distribution": True,
        "param_distribution": True,
        "format": "csv",
        "ops": ["norm"],
        "ndigits": 16,
        "step_count_per_record": 1000,
        "alert": {
            "rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}],
            "dump": True,
        },
    }

    def run(self, task: Task, out: Path) -> None:
        """Train with a configuration file."""
        (out / "config.json").write_text(json.dumps(self.config))
        super().run(task, out)

    def names(self, fault: str, out: Path) -> set[str]:
        """Return what its alarms are about, with the rank; and what its records hold."""
        files = (out / "monitor" / "anomaly_detected").glob("*/anomaly.json")
        events = [event for file in files for event in json.loads(file.read_text()).values()]
        alarms = {f"alarm {event['tag_name']}" for event in events}
        return alarms | {f"record {name}" for name in self._differing(out)}

    @staticmethod
    def _differing(out: Path) -> set[str]:
        """Return the kinds of records that must be equal on all ranks and are not."""
        differing = set()
        for kind in ("grad_reduced", "param_updated"):
            norms: dict[tuple[str, str], set[str]] = {}
            for file in (out / "monitor").glob(f"*/{kind}_*.csv"):
                for row in csv.DictReader(file.read_text().splitlines()):
                    norms.setdefault((row["name"], row["step"]), set()).add(row["norm"])
            if any(len(values) > 1 for values in norms.values()):
                differing.add(kind)
        return differing

    def judge(self, fault: str, said: set[str], healthy: set[str]) -> Verdict:
        """Tell alarms from what a reader of the records could see."""
        alarms = {name for name in said - healthy if name.startswith("alarm")}
        ranks = {name.split("/")[1] for name in alarms}
        seen = sorted(name.removeprefix("record ") for name in said - healthy - alarms)
        words = f"{len(alarms)} new" + (f"; {', '.join(seen)} differ" if seen else "")
        return {"found": bool(alarms), "named": ranks == {f"rank{HIT}"}, "words": words}


class AdaptDL(Tool):
    """AdaptDL's data-parallel wrapper and loader: a noise scale, no verdict."""

    packages = ("adaptdl==0.2.11", "requests", "setuptools<81", "semver<3")
    title = "AdaptDL 0.2.11"
    judges = False

    def names(self, fault: str, out: Path) -> set[str]:
        """Return its noise scale at the end."""
        return {f"{json.loads((out / 'noise-0.json').read_text()):.2f}"}

    def judge(self, fault: str, said: set[str], healthy: set[str]) -> Verdict:
        """Tell the number; nothing judges it."""
        return {"found": None, "named": False, "words": f"noise scale {', '.join(said)}"}


TOOLS: dict[str, type[Tool]] = {
    "rankscope": Rankscope,
    "traincheck": TrainCheck,
    "traincheck-full": TrainCheckFull,
    "msprobe": Msprobe,
    "adaptdl": AdaptDL,
}
NOT_FOR: dict[str, dict[str, str]] = {
    "adaptdl": {
        "D5": "its loader shards",
        "D1": "its loader shards",
        "Y4": "its wrapper synchronises",
    }
}
"""Faults that a tool's own loop excludes."""


def make_folder(path: Path) -> Path:
    """Return a folder that is empty."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def bench_faults(tool: Tool, folder: Path, faults: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run a tool on two healthy runs and on each fault; yield what is known so far."""
    tool.prepare(folder)

    def said(fault: str, seed: int) -> set[str]:
        out, known = folder / f"{fault}-{seed}", folder / f"{fault}-{seed}.json"
        if not known.exists():
            tool.run(Task(tool.name, fault, seed), make_folder(out))
            known.write_text(json.dumps(sorted(tool.names(fault, out))))
        return set(json.loads(known.read_text()))

    healthy = [said("none", seed) for seed in (SEED, OTHER_SEED)]
    rows: dict[str, Any] = {"healthy": [sorted(names) for names in healthy]}
    print(tool.name, "healthy", [len(names) for names in healthy], flush=True)
    for fault in faults:
        reason = NOT_FOR.get(tool.name, {}).get(fault)
        if reason is None:
            rows[fault] = tool.judge(fault, said(fault, SEED), healthy[0] | healthy[1])
        else:
            rows[fault] = {"found": None, "named": False, "words": reason}
        print(tool.name, fault, rows[fault], flush=True)
        yield rows


def bench_cost(tool: Tool, folder: Path, faults: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Time a step on two ranks, plain and watched in turns; yield what is known so far."""
    tool.prepare(folder)
    ratios, plain_ms = [], []
    plain = Plain(tool)
    for pair in range(PAIRS):
        seconds = {}
        for watched in (False, True) if pair % 2 else (True, False):
            name = tool.name if watched else "none"
            task = Task(name, steps=TIMED_STEPS, ranks=2, width=512)
            out = make_folder(folder / f"timed-{name}")
            (tool if watched else plain).run(task, out)
            seconds[watched] = median_seconds(out)
        ratios.append(seconds[True] / seconds[False])
        plain_ms.append(1e3 * seconds[False])
        print(tool.name, "step-time ratio", ratios[-1], flush=True)
        yield {"ratios": ratios, "plain_milliseconds": plain_ms}


PARTS: dict[str, Callable[[Tool, Path, Sequence[str]], Iterator[dict[str, Any]]]] = {
    "faults": bench_faults,
    "cost": bench_cost,
}


def measured(
    tool: Tool, part: str, folder: Path, faults: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield what is known of a part so far; of a tool that fails, the error."""
    try:
        tool.make_environment()
        yield from PARTS[part](tool, folder, faults)
    except Exception as error:  # is what the table tells of that tool
        print(tool.name, part, error, file=sys.stderr, flush=True)
        yield {"error": str(error)}


# The page ------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """Return both tables: what was found at what cost, and what was said."""
    tools = [name for name in TOOLS if name in results]
    lines = ["| tool | step-time ratio | found of 8 | worker of 4 | alarms of healthy runs |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [_summary(name, results[name]) for name in tools]
    judged = [name for name in tools if "faults" in results[name] and TOOLS[name].judges]
    lines += ["", f"| fault | {' | '.join(TOOLS[name].title for name in judged)} |"]
    lines += ["| --- |" + " --- |" * len(judged)]
    for fault in FAULTS:
        cells = [_cell(results[name]["faults"], fault) for name in judged]
        lines.append(f"| {fault}: {catalogue()[fault].mechanism} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _summary(name: str, result: dict[str, Any]) -> str:
    cost, faults = result.get("cost"), result.get("faults")
    ratio = "did not run" if cost else "not measured"
    if cost and "error" not in cost:
        ratios = cost["ratios"]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    if faults is None:
        return f"| {TOOLS[name].title} | {ratio} | – | – | – |"
    if "error" in faults:
        return f"| {TOOLS[name].title} | {ratio} | did not run | did not run | did not run |"
    if not TOOLS[name].judges:
        return f"| {TOOLS[name].title} | {ratio} | logs only | – | – |"
    found = sum(faults[fault]["found"] for fault in FAULTS if fault in faults)
    named = sum(faults[fault]["named"] for fault in FAULTS if fault in faults and hits_one(fault))
    alarms = [sum(not one.startswith("record") for one in names) for names in faults["healthy"]]
    told = ", ".join(map(str, alarms))
    return f"| {TOOLS[name].title} | {ratio} | {found} | {named} | {told} |"


def _cell(faults: dict[str, Any], fault: str) -> str:
    if fault not in faults:
        return "did not run" if "error" in faults else "not measured"
    verdict = faults[fault]
    named = ", worker named" if verdict["named"] and hits_one(fault) else ""
    return f"{verdict['words']}{named}"


def hits_one(fault: str) -> bool:
    """Return whether a fault is one worker's."""
    return catalogue()[fault].hits is Hits.ONE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="which tools, by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="faults, cost or both")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which faults, by commas")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "peers")
    parser.add_argument("--folder", type=Path, help="keep the runs, and go on from there")
    options = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for name in options.tools.split(","):
            tool = TOOLS[name](name, options.environments)
            for part in options.parts.split(","):
                if name == "traincheck-full" and part == "faults":
                    continue  # the same traces, only more of them
                own = folder / name.removesuffix("-full")
                known = results.setdefault(name, {}).setdefault(part, {})
                for found in measured(tool, part, own, options.faults.split(",")):
                    known.pop("error", None)
                    known.update(found)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                    fill_table(PAGE, "python benchmarks/peers.py", render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
