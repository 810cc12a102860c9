"""Which tests enter which functions of rankscope: those that can notice a change of one.

The suite runs once in a copy of the repository whose functions note that they are entered. Ranks,
agents and commands that tests start do so too. They may be forked from a process that an earlier
test has started, so a plugin writes down which test file is running.
"""

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

NOTES = "RANKSCOPE_ENTERED"
"""The variable that names the file of the notes."""

_NOTE = "_note_entered"
_NOTING = f'''
import os

_noted, _tests = set(), {{}}


def _test_of(process):
    if str(process) == os.environ.get("{NOTES}_BY"):
        return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if process not in _tests:
        try:
            with open(os.environ["{NOTES}"] + os.environ["{NOTES}_BY"]) as file:
                _tests[process] = file.read()
        except OSError:
            return ""
    return _tests[process]


def {_NOTE}(function):
    if "{NOTES}_BY" not in os.environ:
        return
    test = _test_of(os.getpid())
    if (test, function) not in _noted:
        _noted.add((test, function))
        try:
            file = os.open(os.environ["{NOTES}"], os.O_WRONLY | os.O_APPEND)
        except OSError:  # some tests take away the file descriptors
            return
        os.write(file, f"{{test}} {{function}}\\n".encode())
        os.close(file)
'''
_PLUGIN = f'''
import os


def pytest_configure(config):
    os.environ["{NOTES}_BY"] = str(os.getpid())


def pytest_runtest_logstart(nodeid, location):
    with open(os.environ["{NOTES}"] + os.environ["{NOTES}_BY"], "w") as file:
        file.write(nodeid.partition("::")[0])
'''

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Entered:
    """What a run of the suite entered.

    Attributes:
        tests: Test files that enter each function, which is a path and a name in it.
        seconds: How long each test file took.
        failed: Test files that failed, and decide nothing.
    """

    tests: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def of(self, path: str, line: int, source: str) -> list[str]:
        """Return the test files that enter a line's function, quickest first.

        Code outside of functions, and a function that nothing is seen to enter, count as entered
        by all that enter a function of the file.

        Args:
            path: Of a file, below the repository's root.
            line: In it.
            source: The file's text.
        """
        around = [
            (node.lineno, name)
            for name, node in functions_of(ast.parse(source))
            if _first_line(node) <= line <= (node.end_lineno or 0)
        ]
        names = {f"{path}::{max(around)[1]}"} if around else set[str]()
        if not names & self.tests.keys():
            names = {name for name in self.tests if name.startswith(f"{path}::")}
        tests = {test for name in names for test in self.tests.get(name, ())}
        return sorted(tests - {*self.failed}, key=lambda test: (self.seconds.get(test, 0.0), test))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Entered":
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))


def functions_of(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Yield a file's functions, with the names of the classes and functions around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{within}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions_of(node, f"{name}.")
        else:
            yield from functions_of(node, within)


def _first_line(node: Function) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def add_notes(path: str, source: str) -> str:
    """Return a file's text with a note at the beginning of each function.

    Functions that a compiler of its own reads (``triton.jit``) stay as they are.
    """
    tree = ast.parse(source)
    for name, node in functions_of(tree):
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            after = int(ast.get_docstring(node) is not None)
            node.body.insert(after, ast.parse(f"{_NOTE}({f'{path}::{name}'!r})").body[0])
    futures = [n for n, one in enumerate(tree.body) if _is_future(one)]
    after = futures[-1] + 1 if futures else int(ast.get_docstring(tree) is not None)
    tree.body.insert(after, ast.parse(f"from rankscope._entered import {_NOTE}").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def trace(copied: Path, files: Sequence[str], processes: int, tests: str = "tests") -> Entered:
    """Run the suite in a copy of the repository, and return what it enters.

    Args:
        copied: The copy, which keeps the notes.
        files: Paths of the files to note, below the copy.
        processes: Tests that run at once.
        tests: Which tests.
    """
    for path in files:
        (copied / path).write_text(add_notes(path, (copied / path).read_text()))
    (copied / "src/rankscope/_entered.py").write_text(_NOTING)
    (copied / "src/entered_plugin.py").write_text(_PLUGIN)
    notes, times = copied / "entered.txt", copied / "times.xml"
    notes.touch()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "entered_plugin"),
        *("-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"),
        *("-o", "junit_family=xunit1", f"--junitxml={times}", tests),
    ]
    variables = {"PYTHONPATH": str(copied / "src"), NOTES: str(notes)}
    subprocess.run(
        command,
        cwd=copied,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return _read(notes.read_text(), ElementTree.parse(times))


def _read(notes: str, times: "ElementTree.ElementTree[ElementTree.Element]") -> Entered:
    seconds, failed = defaultdict[str, float](float), set[str]()
    for case in times.iter("testcase"):
        file = case.get("file", "")
        seconds[file] += float(case.get("time", 0.0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(file)
    tests = defaultdict[str, set[str]](set)
    for line in notes.splitlines():
        test, _, function = line.partition(" ")
        if test:
            tests[function].add(test)
    return Entered(
        {function: sorted(files) for function, files in sorted(tests.items())},
        {file: round(took, 2) for file, took in sorted(seconds.items())},
        sorted(failed),
    )
