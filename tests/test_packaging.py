"""The wheel and the source distribution: what they hold; and what an import brings along."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from rankscope.gradients.kernels.build import LEVELS
from support.kernel_checks import needs_compiler

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rankscope"
DATA = {"py.typed"}
"""What is no Python file and must be in the package, beside the pages' templates."""

ALLOWED = {
    *("report/templates/*", "report/live/*", "sinks/*.json", "integrations/*.json"),
    *("evidence/*/findings.toml", "gradients/kernels/kernels-*.so", *DATA),
}
HEAVY = {
    *("torch", "numpy", "pyarrow", "typer", "rich", "altair", "jinja2", "transformers", "pandas"),
    *("starlette", "uvicorn", "lightning", "ray", "deepspeed"),
    *("tensorboard", "wandb", "mlflow", "trackio"),
}


@pytest.fixture(scope="module")
def built(folder):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("rankscope/") for name in names)
    inside = {name.removeprefix("rankscope/") for name in names}
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    templates = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.glob("report/templates/*")
        if path.is_file()
    }
    assert modules <= inside
    assert inside >= DATA
    assert templates <= inside
    others = inside - modules
    unexpected = [name for name in others if not any(fnmatch(name, rule) for rule in ALLOWED)]
    assert unexpected == [], "files that nobody named: add them to ALLOWED, or keep them out"


def test_the_source_distribution_can_be_built_tested_and_read(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
        *("constraints.txt", "mkdocs.yml", "docs/index.md", "docs/hooks/site.py"),
        *("tests/conftest.py", "tests/support/ranks.py", "examples/ddp_two_lines.py"),
        *("benchmarks/bench.py", "benchmarks/faults/catalogue.toml", "src/rankscope/py.typed"),
        "hatch_build.py",
    }
    assert needed <= names
    assert not [
        name
        for name in names
        if fnmatch(name, "*.pyc") or (name.startswith((".", "runs/")) and name != ".gitignore")
    ]


@needs_compiler
def test_the_wheel_holds_compiled_kernels_for_any_python_on_this_platform(built, wheel):
    [path] = built.glob("*.whl")
    tags = path.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"]
    assert tags[2] != "any"
    assert "manylinux" not in tags[2]
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
    about = Parser().parsestr(wheel.read(name).decode())
    assert about["Root-Is-Purelib"] == "false"
    assert about["Tag"] == "-".join(tags)
    inside = {name for name in wheel.namelist() if name.endswith(".so")}
    folder = "rankscope/gradients/kernels"
    assert inside == {f"{folder}/kernels-{level}.so" for level in LEVELS}


def test_without_a_compiler_the_package_is_built(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]
    without = {**os.environ, "CC": "no-such-compiler"}
    subprocess.run([*build, str(ROOT)], env=without, capture_output=True, check=True)
    [path] = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".c", ".h"))]


def modules_after(code):
    tell = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", f"{code}\n{tell}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_an_import_brings_nothing_heavy():
    assert modules_after("import rankscope") & HEAVY == set()


def test_the_command_line_and_its_help_bring_no_extra():
    extras = HEAVY - {"numpy", "pyarrow", "typer", "rich"}
    found = modules_after(
        "from typer.testing import CliRunner\nfrom rankscope.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0"
    )
    assert found & extras == set()
