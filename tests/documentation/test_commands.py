import json
import re
import shutil
import tomllib
from importlib.util import find_spec
from itertools import takewhile

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from cli.test_replay import make_bundle
from documentation.blocks import PAGES, ROOT, blocks, commands
from documentation.tables import NOT_RUN, PROGRAMS
from rankscope.bus.bundles import save_bundle
from rankscope.bus.finding import Finding, Severity
from rankscope.cli.main import NAME, app
from record.run_files import write
from record.step_reports import make_report

COMMANDS = commands()
A_RUN = r"\b(?:RUN\w*|runs/[\w/-]+)"
RUN = {
    re.sub(A_RUN, "RUN", " ".join(command.words)): command
    for command in reversed(COMMANDS)
    if command.words[0] not in PROGRAMS and not str(command).startswith(tuple(NOT_RUN))
}.values()
"""Each command once, whatever run it is about."""

DATA = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
ELSEWHERE = {"python": "test_python_blocks.py", "sql": "tests/test_docs.py"}
MODEL = "from cli.test_replay import model as make\n"


@pytest.fixture(scope="module")
def recorded(folder):
    writer = write(folder / "run", [make_report(step, micro=2, groups=True) for step in range(6)])
    writer.add_findings([Finding("verify", "verify.agrees", Severity.NOTE, (), 2, 2, "Right.", "")])
    writer.close()
    saved = save_bundle(folder / "run", make_bundle())
    saved.rename(saved.with_name("rank-2-step-66"))
    (folder / "my_model.py").write_text(MODEL)
    return folder


@pytest.fixture
def place(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(recorded))
    return tmp_path


def make_arguments(command, recorded, place):
    for word in command.words[2:]:
        name = word.split("/replay/")[0]
        if re.fullmatch(A_RUN, name) and not (place / name).exists():
            shutil.copytree(recorded / "run", place / name)
    for word in command.words:
        if word.endswith(".safetensors"):
            save_parameters(place / word)
        if word == "gradients.npz":
            rows = np.random.default_rng(0).normal(size=(4, 400)).astype(np.float32)
            np.savez(place / word, **{"layer.weight": rows})


def save_parameters(path):
    from safetensors.torch import save_file

    from cli.test_replay import model

    save_file(model().state_dict(), path)


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_runs(command, recorded, place):
    assert command.words[0] == "rankscope", "add it to PROGRAMS, with the reason"
    make_arguments(command, recorded, place)
    words = command.words[1:]
    words = words[: words.index("|")] if "|" in words else words
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 1), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_and_its_options_exist(command):
    assert command.words[0] in CHECKS, "teach CHECKS this program"
    CHECKS[command.words[0]](command.words[1:])


def check_rankscope(words):
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        if words[0] == "run" and command.name == NAME:  # the rest is a script's own
            words = list(takewhile(lambda word: word.startswith("-"), words[1:]))
            command = command.commands["run"]
            break
        command, words = command.commands[words[0]], words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h"}
    for end in ("--", "|"):
        words = words[: words.index(end)] if end in words else words
    for word in words:
        assert not word.startswith("--") or word.split("=")[0] in known, word
    assert not getattr(command, "commands", {}) or not words or words[0].startswith("-")


def check_script(words):
    words = words[: words.index(">")] if ">" in words else words
    if words and words[0] == "-m":
        assert find_spec(words[1]) is not None, words[1]
        return
    script = ROOT / words[0]
    if not script.is_file():
        assert words[0] in ("train.py", "your_script.py"), f"{words[0]} does not exist"
        return
    source = script.read_text()
    for path in script.parent.glob("*.py"):
        source += path.read_text() if f"{path.stem} import" in source else ""
    for word in words[1:]:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in source, f"{words[0]} has no option {word}"


def check_torchrun(words):
    known = ("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint")
    while words[0].startswith("--"):
        assert words[0].split("=")[0] in (*known, "--standalone"), words[0]
        words = words[1:] if "=" in words[0] or words[0] == "--standalone" else words[2:]
    if words[:2] == ["-m", "rankscope"]:
        check_rankscope(words[2:])
    else:
        check_script(words)


def check_make(words):
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        assert "=" in word or re.search(rf"^{word}:", makefile, re.M), f"no target {word}"


def check_pip(words):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] == "install"
    for word in words[1:]:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?", word).groups()
        if name in (".", "rankscope"):
            extras = set(filter(None, (extras or "").split(",")))
            assert extras <= known["optional-dependencies"].keys(), word


def no_check(words):
    """The programs of others: not ours to know."""


CHECKS = {
    "rankscope": check_rankscope,
    "torchrun": check_torchrun,
    "make": check_make,
    "python": check_script,
    "python3": check_script,
    "pip": check_pip,
    **dict.fromkeys(("curl", "duckdb", "jq", "ssh"), no_check),
}


def test_whatever_is_not_run_is_named_with_its_reason():
    assert {command.words[0] for command in COMMANDS} - {"rankscope"} == PROGRAMS.keys()
    found = [str(command) for command in COMMANDS if command.words[0] == "rankscope"]
    others = [block for block in blocks() if block.kind not in {"commands", *DATA}]
    found += [f"{block.page}: {block.first}" for block in others]
    for name in NOT_RUN:
        assert any(each.startswith(name) for each in found), f"remove {name} from NOT_RUN"
    for block in others:
        known = block.kind != "unknown" or f"{block.page}: {block.first}".startswith(tuple(NOT_RUN))
        assert known, f"call {block} text, or name it in NOT_RUN"
    kinds = {block.kind for block in blocks()} - DATA.keys() - ELSEWHERE.keys()
    assert kinds <= {"commands", "text", "unknown"}, "teach the runner this language"
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_data_can_be_read(page):
    for block in blocks():
        if block.kind in DATA and ROOT / block.page == page:
            assert DATA[block.kind](block.code) is not None
