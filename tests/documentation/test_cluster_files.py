"""The files for clusters: valid, and true to this project. No cluster is at hand to try them on."""

import re
import subprocess

import pytest
import yaml
from typer.testing import CliRunner

from documentation.blocks import ROOT
from rankscope.cli.main import app

FOLDER = ROOT / "examples" / "cluster"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def instructions():
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.mark.parametrize("name", ["sft.sbatch", "nccl.sbatch"])
def test_the_batch_script_is_one_that_bash_reads(name):
    script = FOLDER / name
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # Slurm reads none after that


def test_the_job_starts_its_script_under_rankscope_in_every_pod():
    job, policy = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    labels = policy["spec"]["podSelector"]["matchLabels"]
    for replica in replicas.values():
        assert replica["template"]["metadata"]["labels"] == labels
        (container,) = replica["template"]["spec"]["containers"]
        assert container["command"][:4] == ["torchrun", "-m", "rankscope", "run"]
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", ["sft.sbatch", "pytorchjob.yaml"])
def test_what_they_ask_of_rankscope_is_something_that_it_takes(name):
    text = (FOLDER / name).read_text()
    known = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    asked = re.search(r"rankscope,? run,? (--[a-z-]+)", text)
    assert asked is not None
    assert asked.group(1) in known


def test_the_image_is_made_of_files_and_extras_that_there_are():
    words = [word for word, _ in instructions()]
    assert words[:2] == ["ARG", "FROM"]
    assert set(words) <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR"}
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
    (extras,) = re.findall(r"rankscope\[(.+?)\]", DOCKERFILE)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
