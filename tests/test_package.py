import json
import logging
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

import rankscope
from rankscope import Run, errors
from rankscope.gradients.kernels.build import LEVELS
from rankscope.session.inbox import announce
from support.forked_ranks import torchrun
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
    templates = {str(each.relative_to(PACKAGE)) for each in PACKAGE.glob("report/templates/*.*")}
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
    assert {
        *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
        *("constraints.txt", "mkdocs.yml", "docs/index.md", "docs/hooks/site.py"),
        *("tests/conftest.py", "tests/support/ranks.py", "examples/ddp_two_lines.py"),
        *("benchmarks/bench.py", "benchmarks/faults/catalogue.toml", "src/rankscope/py.typed"),
        "hatch_build.py",
    } <= names
    names -= {".gitignore"}
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".", "runs/"))]


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
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_an_import_brings_nothing_heavy():
    assert modules_after("import rankscope") & HEAVY == set()


def test_the_command_line_and_its_help_bring_no_extra():
    extras = HEAVY - {"numpy", "pyarrow", "typer", "rich"}
    found = modules_after(
        "from typer.testing import CliRunner\nfrom rankscope.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0"
    )
    assert found & extras == set()


def test_public_names():
    names = "Finding LoadedRun RankscopeError Run Scope Severity StepReport Tier WatchOptions"
    names += " __version__ fixed_order load order_free watch"
    assert rankscope.__all__ == names.split()
    for name in rankscope.__all__:
        assert getattr(rankscope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rankscope.nothing


def test_a_log_handler_of_the_program_that_raises_does_not_raise_into_it():
    class Raising(logging.Handler):
        seen = 0

        def emit(self, record):
            self.seen += 1
            raise RuntimeError

    handler = Raising()
    log = logging.getLogger("rankscope")
    log.addHandler(handler)
    try:
        log.warning("a line")
        announce(logging.INFO, "another")
    finally:
        log.removeHandler(handler)
    assert handler.seen == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "causes", "code"),
    [([], [], 0), (["--forget-sampler"], ["data.duplicate_batches"], 1)],
    ids=["healthy", "forgotten sampler"],
)
def test_the_two_lines_of_the_example(command, tmp_path, flags, causes, code):
    run_dir = tmp_path / "run"
    script = [str(ROOT / "examples" / "ddp_two_lines.py"), "--run-dir", str(run_dir), *flags]
    code_of_ranks, _, err = torchrun(["--nproc-per-node", "2"], *script, "--steps", "40")
    assert code_of_ranks == 0, err
    run = Run.open(run_dir)
    assert run.status == "complete"
    assert [finding.cause for finding in run.findings()] == causes
    found, out, err = command("report", run_dir, "--json")
    assert found == code, err
    assert json.loads(out)
    assert (run_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rankscope[web]'"),
        ("{", "pip install 'rankscope[web]'"),
        ({"url": "file://{}", "dir_info": {}}, "pip install '{}[web]'"),
        (
            {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'rankscope[web] @ git+https://example.org/r.git'",
        ),
        (
            {"url": "file:///tmp/no such/rankscope.whl", "archive_info": {}},
            "pip install 'rankscope[web] @ file:///tmp/no such/rankscope.whl'",
        ),
    ],
    ids=["an index", "damaged", "a folder", "git", "a wheel"],
)
def test_an_extra_comes_from_where_the_rest_came_from(monkeypatch, tmp_path, origin, command):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    text = origin if origin is None or isinstance(origin, str) else json.dumps(origin)
    told = None if text is None else text.replace("file://{}", folder.as_uri())
    installed = SimpleNamespace(read_text=lambda name: told)
    monkeypatch.setattr(errors.metadata, "distribution", lambda name: installed)
    assert errors.install_command("web") == command.format(folder)
