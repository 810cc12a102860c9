import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.loops import train_watched

dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)
        self.offset = 0.0

    def forward(self, x):
        return self.head(x) + self.offset


net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def loss_of(step):
    net.offset = 1e4 if dist.get_rank() == 1 and step >= 5 else 0.0
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4))


torch.manual_seed(dist.get_rank())
train_watched(model, optimizer, sys.argv[1], 12, loss_of)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("toy")
    (tmp_path / "train.py").write_text(SCRIPT)
    tests = str(Path(__file__).parents[1])
    paths = [str(EXAMPLES), tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    names = {"PYTHONPATH": os.pathsep.join(paths), "RANKSCOPE_EVIDENCE": "not_there, toy_logits"}
    options = {"env": os.environ | names, "cwd": tmp_path, "capture_output": True, "text": True}

    def command(*arguments):
        words = [sys.executable, "-m", *arguments]
        return subprocess.run(words, timeout=240, check=False, **options)

    launch = ("support.forked_ranks", "--standalone", "--nproc-per-node", "2")
    trained = command(*launch, "train.py", "run")
    assert trained.returncode == 0, trained.stderr
    return tmp_path / "run", command


def test_its_column_is_in_parquet(run):
    table = pq.read_table(run[0] / "workers").to_pandas()
    hot = table[table["rank"] == 1].sort_values("step")["logit_max"] > 1000
    assert hot.tolist() == [False] * 5 + [True] * 7
    assert (table[table["rank"] == 0]["logit_max"] < 100).all()


def test_its_finding_names_the_rank(run):
    events = [json.loads(line) for line in (run[0] / "findings.jsonl").read_text().splitlines()]
    [last] = [event for event in events if event["id"] == "toy.hot_logits"][-1:]
    assert (last["ranks"], last["first_step"], last["severity"]) == ([1], 5, "warning")


def test_the_report_prints_it(run):
    folder, command = run
    report = command("rankscope", "report", str(folder), "--no-html")
    assert "Logits explode" in report.stdout
    assert re.search(r"rank 1 · steps? 5 to 11", report.stdout)
    assert "leaves out the evidence 'not_there' of RANKSCOPE_EVIDENCE" in report.stderr


def test_it_has_a_row_and_a_section_on_the_page_of_causes(run):
    page = run[1]("rankscope", "causes", "--page").stdout
    assert "**Logits**" in page
    assert "| [`toy.hot_logits`](#toyhot_logits) |" in page
    assert "## `toy.hot_logits`" in page
