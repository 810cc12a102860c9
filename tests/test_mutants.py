"""What `make mutants` does to the code: one place of it, and never an annotation."""

import ast
import subprocess
from pathlib import Path

import pytest

from support.benchmarks import load_benchmark

mutants = load_benchmark("mutants")
mutant_tests = load_benchmark("mutant_tests")

CODE = '''
@dataclass(frozen=True)
class Limits:
    most: Literal[3] = 3

def first(values: Sequence[int], start=0) -> Literal[1]:
    """Return 5 of them."""
    if values and not start:
        log.info("2")
        values.sort()
    return min(values[start:], default=1.0 + start)
'''


def test_each_mutant_changes_one_place():
    places = mutants._Places()
    places.visit(ast.parse(CODE))
    assert [mutants._words(*pair) for pair in places.found] == [
        "3 → 4",
        "0 → 1",
        "not start → start",
        "values and (not start) → values or not start",
        "values.sort() → pass",
        "values and (not start) → not (values and (not start))",
        "1.0 → 2.0",
        "1.0 + start → 1.0 - start",
        "min(values[start:], default=1.0 + start) → max(values[start:], default=1.0 + start)",
        "return min(values[start:], default=1.0 + start) → return None",
    ]
    plain = ast.unparse(ast.parse(CODE)).splitlines()
    for number in range(len(places.found)):
        tree = mutants._Places(number).visit(ast.parse(CODE))
        changed = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
        assert len(changed) == len(plain)
        assert sum(one != other for one, other in zip(plain, changed, strict=True)) == 1


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    copied = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", str(mutants.ROOT), str(copied)], check=True)
    return copied


PATH = "src/rankscope/bus/environment.py"


def test_functions_note_the_tests_that_enter_them(copied: Path):
    entered = mutant_tests.trace(copied, [PATH], 1, "tests/bus/test_secrets.py")
    assert not entered.failed
    assert set(entered.seconds) == {"tests/bus/test_secrets.py"}
    assert entered.tests[f"{PATH}::_is_secret"] == ["tests/bus/test_secrets.py"]


@pytest.mark.parametrize(
    ("change", "killer", "passed"),
    [
        ("_is_secret(name) → not _is_secret(name)", "tests/bus/test_secrets.py::", 0),
        (None, "", 1),
    ],
)
def test_a_mutant_is_decided_by_tests(copied: Path, change, killer, passed):
    every = mutants.mutants_of(PATH)
    mutant = next((one for one in every if one.change == change), None) or mutants.Mutant(
        PATH, len(every), 0, "nothing"
    )
    before, entered = (copied / PATH).read_text(), mutant_tests.Entered()
    decided = mutants.decide(mutant, copied, ["tests/bus/test_secrets.py"], entered, 1.0)
    assert decided[0].partition("::")[0] == killer.partition("::")[0]
    assert decided[1] == passed
    assert (copied / PATH).read_text() == before
