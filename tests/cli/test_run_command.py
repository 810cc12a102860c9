import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.bus.plan import Tier
from rankscope.cli.run import ReducedOption
from rankscope.integrations import run_script
from rankscope.integrations.run_script import ScriptJob
from rankscope.wrappers.tap import ReadReduced

SCRIPT = """
import json, os, signal, sys
from neighbour import NAME  # a file beside this one

class Local:
    pass

print(json.dumps({
    "argv": sys.argv, "name": __name__, "neighbour": NAME, "pid": os.getpid(),
    "flags": [sys.flags.dev_mode, sys.dont_write_bytecode], "path": sys.path,
    "module": Local.__module__, "site": getattr(sys.modules.get("sitecustomize"), "OWN", None),
    "modules": sorted(name for name in sys.modules if "rankscope" in name or name == "torch"),
}), flush=True)
if "raise" in sys.argv:
    raise ValueError("a message\\nof two lines") from KeyError("cause")
if "wait" in sys.argv:
    signal.pause()
sys.exit(3)
"""


def test_reduced_has_the_words_of_watch():
    assert {str(option) for option in ReducedOption} == {str(option) for option in ReadReduced}


@pytest.fixture
def ask(command, monkeypatch):
    """Return the command line and the job of ``rankscope run``, which then goes no further."""
    jobs = []

    def execute(path, command, environment):
        monkeypatch.setenv("RANKSCOPE_RUN", environment["RANKSCOPE_RUN"])
        jobs.append((command, ScriptJob.of_this_process()))
        raise OSError(0, "stopped here")

    def run(*words):
        monkeypatch.setattr(run_script.os, "execve", execute)
        command("run", *words)
        return jobs.pop()

    return run


def test_options_reach_watch_and_the_rest_the_script(ask, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train it.py").write_text("")
    (tmp_path / "plan.json").write_text('{"seed": 3}')
    command, job = ask("train it.py", "--every", "4", "--help", "--", "-m")
    assert command[-6:] == ["train it.py", "--every", "4", "--help", "--", "-m"]
    assert (job.run_dir, job.script) == (str(tmp_path / "runs" / "train it"), "train it")
    usual = {"tier": "sketch", "every": 1, "groups": "blocks", "reduced": None, "plan": None}
    usual |= {"overhead_budget": 0.01, "trace": False, "canary": True, "announce": True}
    assert job.options == usual
    words = "--run-dir elsewhere --tier scalars --every 4 --reduced sketch --overhead-budget none"
    words += " --plan plan.json --trace --no-canary --no-announce --sink jsonl:a.jsonl --sink"
    words += " command:true --alert slack:https://example.org/T0 --alert mailto:a@example.org"
    words = [*words.split(), "--groups", '{"a": "b"}']
    command, job = ask(*words, "-m", "project.train", "--tier", "x")
    assert command[-4:] == ["-m", "project.train", "--tier", "x"]
    assert (job.run_dir, job.script) == (str(tmp_path / "elsewhere"), "train")
    assert job.options["groups"] == {"a": "b"}
    assert job.options["plan"]["seed"] == 3
    (tmp_path / "plan.toml").write_text('seed = 4\nloss_weighting = "token"\n')
    _, other = ask("--plan", "plan.toml", "sh")
    assert (other.options["plan"]["seed"], other.options["plan"]["loss_weighting"]) == (4, "token")
    assert job.options["overhead_budget"] is None
    assert job.options["tier"] == str(Tier.SCALARS)
    assert (job.options["trace"], job.options["canary"]) == (True, False)
    assert job.options["announce"] is False
    assert job.options["sinks"] == ["jsonl:a.jsonl", "command:true"]
    assert job.options["alerts"] == ["slack:https://example.org/T0", "mailto:a@example.org"]
    _, job = ask("--parity", "3", "--no-dropout", "--run-dir", "trusted", "sh")
    assert job.parity == {"steps": 3, "no_dropout": True, "compare_with": "trusted"}
    command, job = ask("--", "sh", "start.sh", "train.py", "--run-dir", "x")
    assert Path(command[0]).name == "sh"
    assert (command[1:], job.script) == (["start.sh", "train.py", "--run-dir", "x"], "train")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.py"], "'trian.py', which is neither a file here nor a command"),
        (["--every", "0", "x.py"], "--every"),
        (["--plan", '{"seeed": 1}', "sh"], "'seeed'"),
        (["--plan", "bad.toml", "sh"], "--plan expected TOML in bad.toml: "),
        (["--plan", "no.toml", "sh"], "a file of JSON or TOML, got no.toml"),
        (["--overhead-budget", "-1", "sh"], "--overhead-budget expected a share"),
        (["--evry", "3", "sh"], "--evry"),
        (["--no-dropout", "sh"], "--no-dropout belongs to --parity N"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(command, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("seed = [")
    code, output, errors = command("run", *words)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "a project"
    (folder / "site").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (folder / "site" / "sitecustomize.py").write_text("OWN = 'the user\\'s'\n")
    return folder


def environment(project):
    return {"PYTHONPATH": str(project / "site"), "RANK": "1"}


def ended(folder, *words, **variables):
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": folder}
    options["env"] = {**os.environ, **variables}
    return subprocess.run([sys.executable, *words], check=False, **options)


def both(project, *words, flags=("-X", "dev", "-B"), **variables):
    return [
        ended(project.parent, *flags, *command, *words, **(environment(project) | variables))
        for command in ((), ("-m", "rankscope", "run", "--every", "2"))
    ]


def test_a_user_can_switch_the_command_off(project):
    _, off = both(project, "a project/train.py", RANKSCOPE_RUN="0", RANK="0")
    assert (off.returncode, off.stderr) == (3, "rankscope: not watched, since RANKSCOPE_RUN is 0\n")
    assert not any("rankscope" in path for path in json.loads(off.stdout)["path"])


@pytest.mark.parametrize("variables", [{}, {"RANKSCOPE_RUN": "0"}], ids=["watched", "off"])
def test_a_script_is_the_same_process_with_and_without(project, variables):
    words = ["a project/train.py", "--help", "two words", "-x", "--", "--every=3", ""]
    plain, watched = both(project, *words, **variables)
    assert watched.returncode == plain.returncode == 3
    assert watched.stderr == plain.stderr == ""
    expected, found = json.loads(plain.stdout), json.loads(watched.stdout)
    assert expected.pop("pid") != found.pop("pid")
    assert found == expected
    assert found["argv"] == words
    assert found["path"][0] == str(project)
    assert found["site"] == "the user's"
    assert found["modules"] == []


def test_a_signal_ends_the_script_and_nothing_is_said(project):
    started = subprocess.Popen(
        [sys.executable, "-m", "rankscope", "run", "-m", "train", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=project,
        env={**os.environ, **environment(project), "TMPDIR": str(project)},
    )
    with started:
        assert started.stdout is not None
        assert json.loads(started.stdout.readline())["pid"] == started.pid
        started.send_signal(signal.SIGTERM)
        output, errors = started.communicate(timeout=60)
    assert (started.returncode, output, errors) == (-signal.SIGTERM, "", "")


FAILING = {
    "import no_such_module": 1,
    "import torch, sys; sys.exit(3)": 3,
    "import torch, sys; sys.exit('no data')": 1,
    "import torch; torch.nn.Linear(2, 2)(torch.ones(3, 3))": 1,
}


@pytest.mark.parametrize("script", FAILING)
def test_of_a_script_that_fails_before_it_trains_only_the_exit_code_is_printed(project, script):
    path = project / "failing.py"
    path.write_text(script)
    found = ended(project, "-m", "rankscope", "run", str(path), RANK="0", WORLD_SIZE="2")
    code = FAILING[script]
    assert (found.returncode, found.stdout) == (code, "")
    [line] = [line for line in found.stderr.splitlines() if line.startswith("rankscope: ")]
    assert line == f"rankscope: the script failed with exit code {code}, and nothing was watched"
    assert found.stderr.endswith(f"{line}\n")


def test_a_script_that_trains_nothing_is_told_so_by_rank_0(project):
    variables = {**environment(project), "RANK": "0"}
    found = ended(project, "-m", "rankscope", "run", "-m", "neighbour", **variables)
    assert (found.returncode, found.stdout) == (0, "")
    assert found.stderr.startswith("rankscope: nothing was watched: no process group of several")
    assert found.stderr.count("\n") == 1
    assert not (project / "runs").exists()
