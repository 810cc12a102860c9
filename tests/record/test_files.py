"""Files that grow as a whole."""

import tracemalloc
from pathlib import Path

import pytest

from rankscope import files


def test_what_stood_behind_the_bytes_that_remain_is_replaced(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 4)
    path = tmp_path / "part"
    files.replace(path, b"rows footer")
    files.replace(path, b"more rows footer", after=5)
    assert path.read_bytes() == b"rows more rows footer"
    assert list(tmp_path.iterdir()) == [path]


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


@pytest.mark.parametrize("size", [0, 1000, 3 * 2**20 + 1])
def test_a_read_takes_no_more_memory_than_the_file_is_long(tmp_path: Path, size: int):
    """Not as much as it may be long at most, which a limited address space does not have."""
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    try:
        assert files.read_file(tmp_path / "file") == content
        assert tracemalloc.get_traced_memory()[1] < 4 * size + 2**22
    finally:
        tracemalloc.stop()
