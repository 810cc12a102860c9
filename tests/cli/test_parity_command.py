import json
import os
import re
import shlex
import sys
import time

import pytest

from rankscope.cli import parity
from rankscope.cli.output import terminal
from rankscope.cli.parity import Command, CommandError, _rules_of, render_answer, run_commands
from rankscope.integrations.parity import ParityJob
from rankscope.tools.parity.result import Answer, Difference, Kind
from rankscope.tools.stages import Stage
from support.accidents import state_of
from support.parity import Recordings, answer_of, layout, record

PYTHON = shlex.quote(sys.executable)
TRUE = ("-a", "true", "-b", "true")


def script(folder, name, text):
    path = folder / name
    path.write_text(text)
    return f"{PYTHON} -S {path}" if "import torch" not in text else f"{PYTHON} {path}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*TRUE, "--resume-at", "2"), "belong together"),
        (("-a", "no-such-command", "-b", "true"), "neither a file here nor a command"),
        (("-a", "{folder}", "-b", "true"), "has no parity/"),
        (("-a", "true", "-b", "{folder}"), "-b expected a command, got the directory"),
        (("-a", "true", "-b", "{folder} --lr 1"), "-b: expected a script or a command, got"),
        ((*TRUE, "--html", "x.pdf"), "for a PDF, print the page"),
        (("-a", "true", "-b", "python 'x"), "-b expected a command, got"),
        ((*TRUE, "--map", "nowhere"), "--map expected names, such as"),
        ((*TRUE, "--map", "a,b=c,d"), "and the names of its parts"),
        ((*TRUE, "--map", "a.*=b"), "as many * in each name"),
        (
            (*TRUE, "--resume-at", "2", "-b2", "{folder}"),
            "-b2 expected a command, got the",
        ),
    ],
)
def test_bad_usage_is_one_sentence(command, tmp_path, words, expected):
    words = [word.format(folder=tmp_path) for word in words]
    code, _, err = command("parity", *words)
    assert code == 2
    assert expected in err
    assert "Running" not in err


def test_a_command_that_fails_is_named_with_its_last_words(command, tmp_path):
    bad = script(tmp_path, "bad.py", "if True: raise ValueError('no such corpus')")
    code, out, _ = command("parity", "-a", bad, "-b", bad, "--json")
    answer = json.loads(out)
    assert code == 2
    assert answer["answer"] == "not comparable"
    assert answer["headline"] == "Not comparable: A exited with code 1: ValueError: no such corpus."


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity, "FIRST_LINE_SECONDS", 0.1)
    child = "import time; time.sleep(600)"
    text = (
        "import os, subprocess, sys, time\n"
        f"words = [sys.executable, '-S', '-c', {child!r}]\n"
        "child = subprocess.Popen(words, start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    hangs = Command("A", script(tmp_path, "hangs.py", text), tmp_path / "a", ParityJob(1))
    other = Command("B", script(tmp_path, "other.py", "import time; time.sleep(600)"),
                    tmp_path / "b", ParityJob(1))  # fmt: skip
    begun = time.monotonic()
    with pytest.raises(CommandError, match="A had not ended in time"):
        run_commands([hangs, other], 8.0, together=True)
    assert time.monotonic() - begun < 200
    lines = capsys.readouterr().err
    assert all(f"Running {each.name}: " in lines for each in (hangs, other))
    assert re.search(r"A runs for \d s: 0 of 1 step recorded", lines)
    pids = [int((tmp_path / "pid").read_text())]
    pids += [each._process.pid for each in (hangs, other)]
    assert all(state_of(pid) in ("", "Z") for pid in pids)


IN_ORDER = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(8, 4)

def closure():
    optimizer.zero_grad()
    loss = {factor} * model(data).square().mean()
    loss.backward()
    return loss

for _ in range(9):
    {update}
"""
BY_LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return {factor} * self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

torch.manual_seed(0)
model = Module()
data = DataLoader(torch.randn(32, 4), batch_size=4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
Trainer(max_steps=8, accelerator="cpu", devices=1, **quiet).fit(model, data)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (
            IN_ORDER.format(factor=1, update="closure(); optimizer.step()"),
            IN_ORDER.format(factor="{factor}", update="optimizer.step(closure)"),
        ),
        (BY_LIGHTNING.format(factor=1), BY_LIGHTNING),
    ],
    ids=["closure", "lightning"],
)
def test_forward_and_backward_passes_inside_of_the_optimizers_call(tmp_path, a, b):
    sides = {"a": a, "same": b.format(factor=1), "twice": b.format(factor=2)}
    for name, text in sides.items():
        (tmp_path / f"{name}.py").write_text(text)
    layouts = {name: layout(1, script=str(tmp_path / f"{name}.py")) for name in sides}
    recordings = Recordings(tmp_path)
    assert answer_of(recordings, layouts["a"], layouts["same"], 2).stage is None
    assert answer_of(recordings, layouts["a"], layouts["twice"], 2).stage is Stage.GRADIENT


@pytest.mark.ranks
def test_a_recorded_run_is_compared_with_what_a_command_trains(command, tmp_path):
    recorded = tmp_path / "a.py"
    recorded.write_text(IN_ORDER.format(factor=1, update="closure(); optimizer.step()"))
    code, said = record(tmp_path / "a", layout(1, script=str(recorded)), 2, compare_with="a")
    end = "rankscope: 2 steps recorded in a, and the training ended; to compare: rankscope parity "
    assert (code, said.count("\n")) == (0, 1)
    assert said == f'{end}-a a -b "COMMAND"\n'
    twice = script(tmp_path, "b.py", IN_ORDER.format(factor=2, update="optimizer.step(closure)"))
    words = ["-a", str(tmp_path / "a"), "-b", twice, "--steps", "2", "--json"]
    code, out, _ = command("parity", *words)
    answer = json.loads(out)
    assert (code, answer["stage"]) == (1, "gradient"), answer["headline"]


BY_PARTS = """
import torch
torch.manual_seed(0)
weights = [torch.randn(2, 4), torch.randn(2, 4)]
data = torch.randn(8, 4)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        if {fused}:
            weight = torch.cat(weights)
            self.kv = torch.nn.Parameter(weight)
        else:
            self.k, self.v = map(torch.nn.Parameter, weights)

    def forward(self, rows):
        return rows @ (self.kv if {fused} else torch.cat([self.k, self.v])).T

model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(data).square().mean().backward()
    if not {fused}:
        model.v.grad.mul_({factor})
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.ranks
def test_fused_and_split_parameters_are_compared_by_a_map(command, tmp_path):
    def sides(**factors):
        for name, factor in factors.items():
            path = tmp_path / f"{name}.py"
            path.write_text(BY_PARTS.format(fused=name == "fused", factor=factor))
            yield layout(1, script=str(path))

    split, fused, wrong = sides(split=1, fused=1, wrong=3)
    recordings = Recordings(tmp_path)
    words = "A alone trains 2 parameters (k, v), and B alone 1 parameter (kv); see --map"
    assert words in answer_of(recordings, split, fused, 2).headline
    (tmp_path / "names").write_text("k, v = kv  # A has the parts\n")
    rules_a, rules_b = _rules_of([str(tmp_path / "names")], recorded=False)
    found = answer_of(recordings, split, fused, 2, rules_a=rules_a, rules_b=rules_b)
    assert (found.stage, list(found.curves)) == (None, ["kv"]), found.headline
    a, b = (f"{PYTHON} {side.script}" for side in (fused, wrong))
    options = ("--map", "kv=k,v", "--same-start", "--steps", "2", "--json")
    code, out, _ = command("parity", "-a", a, "-b", b, *options)
    found = json.loads(out)
    assert (code, found["stage"], found["step"]) == (1, "gradient", 0)
    assert found["parameters"][0]["look"].startswith("× 3, in the third and last quarter")


def test_an_answer_has_at_most_twelve_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    answer = Answer(
        Kind.DIFFERENT,
        "In step 0 the gradient differs: all 40 parameters, × 2 (the ratio of workers).",
        Stage.GRADIENT,
        0,
        tuple(
            Difference(f"model.layers.{n}.mlp.up_proj.weight", 0.5, 4e-6, 2.0, 1.0, "× 2")
            for n in range(40)
        ),
        40,
        ("backward was called on 1 × the loss in A, and 2 × in B.", "Another.", "A third."),
        {"gradient": (4e-6, 5e-6), "update": (3e-5, 1e-4)},
    )
    render_answer(answer, terminal())
    out = capsys.readouterr().out
    assert len(out.rstrip("\n").splitlines()) <= 12
    assert "≠ NOT THE SAME" in out
    assert "model.layers.2.mlp" in out
    assert "model.layers.3.mlp" not in out
    assert "What to do: Compare what the loss is divided by" in out
    assert "of its norm, rounding 4e-06" in out
    assert "Smaller faults could be missed: gradients by 4e-06 of their norm" in out
    assert os.linesep.join(["", ""]) in out
