"""The paper's experiment with eight workers, in six trainings that are just long enough.

On real Alpaca records, where they are. ``RANKSCOPE_STUDY`` says where CI has run it already.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rankscope.cli.verdict import render_study

BESIDE = Path(__file__).parents[3] / "shared" / "data" / "alpaca_data.json"
REAL = Path(os.environ.get("RANKSCOPE_ALPACA", BESIDE))

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(900)]


def ran(output: Path) -> str:
    data = ["--data", str(REAL)] if REAL.exists() else []
    command = [sys.executable, "-m", "rankscope", "study", *data]
    options = ["--limit", "512", "--steps", "8", "--max-length", "64", "--output", str(output)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def printed_by(finished: Path) -> str:
    """Return what a study that has ended printed; it must be the one that is wanted here."""
    config = json.loads((finished / "study.json").read_text())["config"]
    wanted = {"workers": 8, "steps": 8, "limit": 512, "seed": 0, "accumulation": 1}
    wanted["max_length"] = 64
    assert {name: config[name] for name in wanted} == wanted
    assert config["data"] == (str(REAL) if REAL.exists() else "builtin")
    printed = io.StringIO()
    render_study(finished, Console(file=printed, width=80))
    return printed.getvalue()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    if finished := os.environ.get("RANKSCOPE_STUDY"):
        output = Path(finished)
        printed = printed_by(output)
    else:
        output = tmp_path_factory.mktemp("acceptance") / "study"
        printed = ran(output)
    entries = json.loads((output / "summary.json").read_text())
    assert len(entries) == 6
    return {(entry["reading"], entry["setting"]): entry for entry in entries}, printed


def test_replicated_workers_agree_as_far_as_their_seeds_do(study):
    entries, _ = study
    same = entries["replicated", "s1-1"]
    assert same["cosine_mean"] >= 0.999
    assert same["loss_std"] <= 1e-6
    assert 0.70 <= entries["replicated", "s1-2"]["cosine_mean"] <= 0.85
    assert entries["replicated", "s1-3"]["cosine_mean"] <= 0.15


def test_sharded_workers_look_alike_under_all_settings(study):
    entries, _ = study
    cosines = [entries["sharded", setting]["cosine_mean"] for setting in ("s1-1", "s1-2", "s1-3")]
    assert max(cosines) - min(cosines) <= 0.1  # those of the replicated reading lie 0.85 apart


def test_only_the_identity_of_samples_tells_sharded_settings_apart(study):
    entries, _ = study
    distinct = [entries["sharded", s]["distinct_samples"] for s in ("s1-1", "s1-2", "s1-3")]
    assert all(entry["samples_drawn"] == 256 for entry in entries.values())
    assert distinct[0] == 256
    assert 256 > distinct[1] > distinct[2]
    assert entries["replicated", "s1-1"]["distinct_samples"] == 32


def test_the_verdicts(study):
    entries, output = study
    healthy = [key for key, entry in entries.items() if entry["severity"] is None]
    assert healthy == [("sharded", "s1-1")]
    assert "Why the two readings differ" in output
    words = " ".join(output.split())
    assert re.search("Rank 0 (probably )?draws samples that belong to other workers", words)
    severities = [entries["replicated", f"s1-{i}"]["severity"] for i in (1, 2, 3)]
    assert severities == ["error", "error", "note"]
