"""What a worker runs on."""

import json
import os
import platform
import subprocess

import numpy as np
import pytest
import torch

from rankscope.wrappers.facts import environment_facts, source_revision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "HF_", "TORCH_", "CUDA_", "LOCAL_RANK")):
            monkeypatch.delenv(name)


def test_versions_and_flags_are_told_in_plain_values():
    facts = environment_facts(CPU)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["deterministic_algorithms"] is False
    assert facts["device"]
    assert json.loads(json.dumps(facts)) == facts


def test_variables_that_decide_how_a_job_computes_are_told(monkeypatch):
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MY_OWN", "3")
    monkeypatch.setenv("RANKSCOPE_RUN_PID", "3")  # of `rankscope run`: another on each worker
    facts = environment_facts(CPU)
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        assert facts[name] == "3"
    assert not {"MY_OWN", "RANKSCOPE_RUN_PID"} & facts.keys()


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "NCCL_AUTHORIZATION", "HF_OF_MY_OWN"])
def test_variables_that_are_not_known_are_never_told(monkeypatch, name):
    monkeypatch.setenv(name, "tell-nobody")
    assert "tell-nobody" not in json.dumps(environment_facts(CPU))


@pytest.mark.parametrize(
    "value",
    [
        "https://me:tell-nobody/and@example.org",
        "https://example.org/?sig=tell-nobody",
        "HTTPS://me:tell@nobody@example.org",
    ],
)
def test_of_an_address_the_host_alone_is_told(monkeypatch, value):
    monkeypatch.setenv("HF_ENDPOINT", value)
    assert environment_facts(CPU)["HF_ENDPOINT"].lower() == "https://example.org/…"


def git(folder, *command):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *who, *command], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_source_revision_is_the_commit_and_whether_files_differ(repository):
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "notes.txt").write_text("not part of the source")
    assert source_revision(repository) == {"revision": commit, "revision_changed": False}
    (repository / "train.py").write_text("lr = 2\n")
    assert source_revision(repository) == {"revision": commit, "revision_changed": True}
