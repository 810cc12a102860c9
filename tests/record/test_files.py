"""Files that grow as a whole."""

import json
import os
from pathlib import Path

import pytest

from rankscope import files
from rankscope.errors import RunError
from rankscope.record import Run


@pytest.mark.parametrize("piece", [4, files._PIECE])
def test_what_stood_behind_the_bytes_that_remain_is_replaced(tmp_path: Path, monkeypatch, piece):
    monkeypatch.setattr(files, "_PIECE", piece)
    path = tmp_path / "part"
    files.replace(path, b"rows footer")
    files.replace(path, b"more rows footer", after=5)
    assert path.read_bytes() == b"rows more rows footer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_shorter_than_it_was_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "part"
    path.write_bytes(b"rows")
    with pytest.raises(RunError, match="part is shorter than it was"):
        files.replace(path, b"more", after=5)
    assert path.read_bytes() == b"rows"
    assert list(tmp_path.iterdir()) == [path]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert files.cache_root() == Path("/somewhere/rankscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert files.cache_root() == Path("/home/someone/.cache/rankscope")


def test_a_file_to_which_others_can_write_is_not_read(tmp_path: Path):
    path = tmp_path / "kept"
    assert files.read_own(path) is None
    path.write_bytes(b"mine")
    path.chmod(0o644)
    assert files.read_own(path) == b"mine"
    path.chmod(0o646)
    assert files.read_own(path) is None
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    assert files.read_own(tmp_path / "link") is None


def test_nothing_is_read_of_a_file_that_is_too_long(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_bytes(b"[]")
    assert files.read_file(path, 2) == b"[]"
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="it is longer than 64 MiB, which no such file is"):
        files.read_file(path)


@pytest.mark.parametrize("name", ["run.json", "findings.jsonl"])
def test_a_run_with_a_sparse_file_is_refused_in_one_sentence(tmp_path: Path, name: str):
    with (tmp_path / "run.json").open("w") as file:
        json.dump({"schema_version": 1, "num_workers": 2}, file)
    with (tmp_path / name).open("ab") as file:
        file.truncate(2**30)
    with pytest.raises(RunError) as raised:
        Run.open(tmp_path).findings()
    assert str(raised.value) == (
        f"{tmp_path / name} is not read: it is longer than 64 MiB, which no such file is; the run "
        "is damaged"
    )
