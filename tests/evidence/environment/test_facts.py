"""What a worker runs on."""

import json
import os
import platform
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.errors import UsageError
from rankscope.evidence.environment import facts as environment
from rankscope.evidence.environment.facts import (
    environment_facts,
    source_revision,
    vocabulary_digest,
)

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


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("pytest", "no-such-package"))
    facts = environment_facts(CPU)
    assert facts["pytest"] == pytest.__version__
    assert "no-such-package" not in facts


def test_variables_that_decide_how_a_job_computes_are_told(monkeypatch):
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MY_OWN", "3")
    monkeypatch.setenv("RANKSCOPE_RUN_PID", "3")  # of `rankscope run`: another on each worker
    facts = environment_facts(CPU)
    for name in ("NCCL_ALGO", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "LOCAL_RANK"):
        assert facts[name] == "3"
    assert not {"MY_OWN", "RANKSCOPE_RUN_PID"} & facts.keys()


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HF_API_KEY", "TORCH_SECRET_X", "ACCELERATE_PASSWORD", "hf_token",
     "NCCL_AUTHORIZATION", "TORCH_PASSPHRASE", "CUDA_ACCESS_KEY_ID", "HF_OF_MY_OWN"],
)  # fmt: skip
def test_variables_that_are_not_known_are_never_told(monkeypatch, name):
    monkeypatch.setenv(name, "tell-nobody")
    assert "tell-nobody" not in json.dumps(environment_facts(CPU))


@pytest.mark.parametrize(
    "value",
    ["https://me:tell-nobody@example.org/hub", "https://me:tell-nobody/and@example.org",
     "https://example.org/?sig=tell-nobody", "https://example.org/tell-nobody#tell-nobody",
     "HTTPS://me:tell@nobody@example.org"],
)  # fmt: skip
def test_of_an_address_the_host_alone_is_told(monkeypatch, value):
    monkeypatch.setenv("HF_ENDPOINT", value)
    assert environment_facts(CPU)["HF_ENDPOINT"].lower() == "https://example.org/…"


def test_long_values_are_cut(monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "x" * 5000)
    assert environment_facts(CPU)["TORCH_LOGS"] == "x" * 200


def test_the_device_is_named_with_its_memory(monkeypatch):
    module = SimpleNamespace(
        get_device_name=lambda device: f"Accelerator of {device}",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    facts = environment_facts(torch.device("cuda:1"))
    assert facts["device"] == "Accelerator of cuda:1"
    assert facts["device_memory"] == 1 << 30


def test_what_cannot_be_told_is_left_out_and_all_else_is_told(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch, "get_device_module", refuse)
    monkeypatch.setattr(environment, "precision_flags", refuse)
    facts = environment_facts(torch.device("cuda"))
    assert "device" not in facts
    assert facts["torch"] == torch.__version__


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


def test_a_folder_without_a_repository_has_no_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_revision(tmp_path) == {}
    assert source_revision(tmp_path / "missing") == {}
    assert source_revision(None) == {}


def test_git_that_takes_too_long_or_is_missing_is_not_waited_for(repository, monkeypatch):
    assert source_revision(repository, seconds=0.0) == {}
    monkeypatch.setenv("PATH", "")
    assert source_revision(repository) == {}


def test_vocabularies_are_equal_when_every_token_has_the_same_number():
    vocabulary = {"a": 0, "b": 1, "é": 2}
    digest = vocabulary_digest(vocabulary)
    assert 0 <= digest < 2**63
    assert vocabulary_digest(dict(reversed(vocabulary.items()))) == digest
    assert vocabulary_digest({**vocabulary, "a": 1, "b": 0}) != digest
    assert vocabulary_digest({**vocabulary, "c": 3}) != digest


def test_a_tokenizer_is_asked_for_its_vocabulary():
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    assert vocabulary_digest(tokenizer) == vocabulary_digest({"b": 1, "a": 0})


def test_tokens_may_be_bytes_or_broken_text():
    assert vocabulary_digest({b"\xff": 0}) != vocabulary_digest({"\udcff": 0})


def test_what_has_no_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"get_vocab\(\).*got list"):
        vocabulary_digest(["a", "b"])
