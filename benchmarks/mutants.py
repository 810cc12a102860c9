"""How many small faults in rankscope's own code its tests notice: mutants, drawn at random.

Each mutant changes one place of one file: a comparison, an operator, a number, a condition, a
returned value, or a call that is left out. First the suite runs once, to learn which test files
enter which functions (``mutant_tests.py``). Of those that enter a mutant's function, the ones that
name its file run first, then the others; the first that fails kills the mutant. What survives is
equivalent to the code as it is, or wants a test. Files are changed in copies of the repository
alone.

Run ``make mutants``, or ``python benchmarks/mutants.py --count 400``. The file of results is read
first, so that a run goes on where another ended, and with a higher ``--limit`` survivors meet the
tests that are left. Which tests enter what is kept beside it. A survivor that somebody has found to
be equivalent gets ``"equivalent"`` and the reason there, by hand.
"""

import argparse
import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutant_tests import Entered, trace
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/mutants.json"
ROOMS = ("stats", "bus", "evidence", "wrappers", "gradients", "verdict", "record")
STARTING_S = 120
"""Tests that take this and three times their usual seconds hang, which kills a mutant as well."""

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LEFT_ALONE = ("annotation", "returns", "decorator_list")
_SILENT = re.compile(r"(_?log(ger)?|warnings)\.")
"""Calls that only tell somebody something."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: Of the file, below the repository's root.
        number: Which of the file's places is changed.
        line: Where it is.
        change: What the line's expression is, and what it becomes.
        above: How many places of the file above this one are changed alike.
    """

    path: str
    number: int
    line: int
    change: str
    above: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """What stays the same when other places of the code are edited."""
        return self.path, self.change, self.above


class _Places(ast.NodeTransformer):
    """Counts the places of a file that can be changed, and changes one.

    Args:
        number: Of the place to change; by default none.
    """

    def __init__(self, number: int = -1) -> None:
        self._number, self.found = number, list[tuple[ast.AST, ast.AST]]()

    def visit(self, node: ast.AST) -> ast.AST:
        """Visit what is neither an annotation nor a decorator."""
        kept = {name: getattr(node, name) for name in _LEFT_ALONE if getattr(node, name, None)}
        for name, held in kept.items():
            setattr(node, name, [] if isinstance(held, list) else None)
        changed = self._change(super().visit(node))
        for name, held in kept.items():
            setattr(node, name, held)
        return changed

    def _change(self, node: ast.AST) -> ast.AST:
        other = _changed_expression(node) or _changed_statement(node)
        if other is None:
            return node
        self.found.append((node, other))
        return ast.copy_location(other, node) if len(self.found) - 1 == self._number else node


def _changed_expression(node: ast.AST) -> ast.AST | None:
    """Return another expression for one that can be changed."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in _COMPARED:
            return ast.Compare(left, [_COMPARED[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in _OPERATED and not _is_text(left):
            return ast.BinOp(left, _OPERATED[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
        case ast.Constant(float(value)):
            return ast.Constant(2.0 * value or 1.0)
        case ast.Call(ast.Name(name), args, keywords) if name in _SWAPPED:
            return ast.Call(ast.Name(_SWAPPED[name], ast.Load()), args, keywords)
        case ast.IfExp(test, body, orelse) if not isinstance(test, ast.Compare | ast.UnaryOp):
            return ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
    return None


def _changed_statement(node: ast.AST) -> ast.AST | None:
    """Return another statement for one that can be changed."""
    match node:
        case ast.Return(ast.expr() as value) if not _is_none(value):
            return ast.Return(ast.Constant(None))
        case ast.If(test, body, orelse) if not isinstance(test, ast.Compare | ast.UnaryOp):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Expr(ast.Call() as call) if not _SILENT.match(ast.unparse(call)):
            return ast.Pass()
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _places_of(path: str) -> list[tuple[ast.AST, ast.AST]]:
    """Return what can be changed in a file, and into what."""
    places = _Places()
    places.visit(ast.parse((ROOT / path).read_text()))
    return places.found


def _words(before: ast.AST, after: ast.AST) -> str:
    change = " → ".join(ast.unparse(getattr(node, "test", node)) for node in (before, after))
    return " ".join(change.split())[:160]


def mutants_of(path: str) -> list[Mutant]:
    """Return a file's mutants."""
    found, alike = [], Counter[str]()
    for number, (before, after) in enumerate(_places_of(path)):
        words = _words(before, after)
        found.append(Mutant(path, number, getattr(before, "lineno", 0), words, alike[words]))
        alike[words] += 1
    return found


def draw(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Return so many mutants, each as likely as any other.

    More are the same and further ones, and an edit of the code changes the draw by its own places.
    """
    files = [path for room in rooms for path in (ROOT / "src/rankscope" / room).rglob("*.py")]
    every = [mutant for path in files for mutant in mutants_of(str(path.relative_to(ROOT)))]
    every.sort(key=lambda one: blake2b(repr((seed, one.key)).encode()).digest())
    return every[:count]


def names_module(test: str, path: str) -> bool:
    """Return whether a test file names a module."""
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    parent, _, stem = module.rpartition(".")
    names = re.compile(
        rf"{re.escape(module)}\b"
        rf"|from {re.escape(parent)} import (\([^)]*|[^\n(]*)\b{re.escape(stem)}\b"
    )
    return names.search((ROOT / test).read_text()) is not None


def tests_of(mutant: Mutant, entered: Entered) -> list[str]:
    """Return the test files that enter a mutant's function, in the order in which they run."""
    tests = entered.of(mutant.path, mutant.line, (ROOT / mutant.path).read_text())
    return sorted(tests, key=lambda test: not names_module(test, mutant.path))


def in_parts(tests: Sequence[str], entered: Entered, limit_s: float) -> Iterator[list[str]]:
    """Yield tests in parts that take longer and longer, up to a limit of their usual seconds."""
    part, took, longest, together = list[str](), 0.0, 15.0, 0.0
    for test in tests:
        together += entered.seconds.get(test, 0.0)
        if part and (took > longest or together > limit_s):
            yield part
            part, took, longest = [], 0.0, 2 * longest
        if together > limit_s:
            return
        part.append(test)
        took += entered.seconds.get(test, 0.0)
    if part:
        yield part


def decide(
    mutant: Mutant, copied: Path, tests: Sequence[str], entered: Entered, limit_s: float
) -> tuple[str, int]:
    """Run tests until one fails.

    Args:
        mutant: The mutant.
        copied: A copy of the repository.
        tests: Test files, in order.
        entered: How long they take.
        limit_s: Seconds after which no further ones run.

    Returns:
        The test that fails, or no name, and how many files pass.
    """
    path, passed = copied / mutant.path, 0
    whole = path.read_text()
    places = _Places(mutant.number)
    try:
        path.write_text(ast.unparse(ast.fix_missing_locations(places.visit(ast.parse(whole)))))
        for part in in_parts(tests, entered, limit_s):
            usual = sum(entered.seconds.get(test, 0.0) for test in part)
            killer = _first_that_fails(part, copied, STARTING_S + 3 * usual)
            if killer is not None:
                return killer, passed
            passed += len(part)
    finally:
        path.write_text(whole)
    return "", passed


def _first_that_fails(tests: Sequence[str], copied: Path, limit_s: float) -> str | None:
    """Return what failed, or what was hanging; None when all tests pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(
        command,
        cwd=copied,
        env={**os.environ, "PYTHONPATH": str(copied / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return f"{' '.join(tests)} take over {limit_s:.0f} s"
    if running.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return failed[1] if failed else f"pytest ends with {running.returncode}"


@contextmanager
def _copies(count: int) -> "Iterator[SimpleQueue[Path]]":
    """Give so many copies of the repository, as it was committed last."""
    free = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            copied = Path(folder) / str(number)
            subprocess.run(["git", "clone", "-q", str(ROOT), str(copied)], check=True)
            build = copied / "src/rankscope/gradients/kernels/build.py"
            subprocess.run([sys.executable, build], check=True)
            free.put(copied)
        yield free


def _entered(path: Path, processes: int) -> Entered:
    """Return what tests enter, from a file of it if there is one."""
    if not path.exists():
        files = [
            str(file.relative_to(ROOT))
            for room in ROOMS
            for file in (ROOT / "src/rankscope" / room).rglob("*.py")
        ]
        with _copies(1) as copies:
            trace(copies.get(), files, 2 * processes).save(path)
    return Entered.load(path)


def save(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a line for each mutant."""
    lines = sorted(json.dumps(result, ensure_ascii=False) for result in results)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def render(results: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each room."""
    ends = ("killed", "equivalent", "survived", "not yet met by all tests", "entered by no test")
    table = Table("room", "mutants", *ends)
    for room in (*ROOMS, "together"):
        rows = [r for r in results if room in ("together", Path(r["path"]).parts[2])]
        found = Counter(map(_end_of, rows))
        table.add_row(room, str(len(rows)), *(str(found[end]) for end in ends))
    return table


def _end_of(result: dict[str, Any]) -> str:
    if result["killer"]:
        return "killed"
    if result.get("equivalent"):
        return "equivalent"
    if not result["tests"]:
        return "entered by no test"
    return "survived" if result["passed"] == result["tests"] else "not yet met by all tests"


def main() -> None:
    """Draw, decide, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=400, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of tests for each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else []
    known = {(r["path"], r["change"], r["above"]): r for r in results}
    console = Console(soft_wrap=True)
    entered = _entered(options.json.with_suffix(".tests.json"), options.processes)
    if entered.failed:
        console.print("These fail, and decide nothing:", *entered.failed, markup=False)
    with _copies(options.processes) as free, ThreadPoolExecutor(options.processes) as pool:

        def work(mutant: Mutant, before: dict[str, Any] | None) -> None:
            tests, passed = tests_of(mutant, entered), 0
            if before is not None and before["tests"] == len(tests):
                passed = before["passed"]
            left_s = options.limit - sum(entered.seconds.get(t, 0.0) for t in tests[:passed])
            copied = free.get()
            killer, further = decide(mutant, copied, tests[passed:], entered, left_s)
            free.put(copied)
            if before is not None:
                results.remove(before)
            ended = {"killer": killer, "passed": passed + further, "tests": len(tests)}
            results.append({**asdict(mutant), **ended})
            save(results, options.json)
            told = (f"{mutant.path}:{mutant.line}", mutant.change, killer or "survived")
            console.print(*told, sep="  ", markup=False)

        drawn = draw(options.count, options.seed, options.rooms)
        waiting = [(mutant, known.get(mutant.key)) for mutant in drawn]
        for done in [
            pool.submit(work, mutant, before)
            for mutant, before in waiting
            if before is None or _end_of(before).startswith("not yet")
        ]:
            done.result()
    console.print(render(results))


if __name__ == "__main__":
    main()
