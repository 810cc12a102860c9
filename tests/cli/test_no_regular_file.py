"""A pipe, a directory, a device or a looping link in place of a file: refused, not waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from fuzz.readers import forked
from rankscope.bus.bundles import load_bundle
from rankscope.cli.numerics import RESULT_FILE, _write
from rankscope.cli.run import _plan
from rankscope.errors import RankscopeError
from rankscope.lab.numerics.gradients import GradientKind, read, save, synthetic
from rankscope.lab.study.data import load_records
from rankscope.tools.replay import _load_checkpoint

KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}
READERS: dict[str, Callable[[Path], object]] = {
    "gradients.npz": read,
    "gradients.npy": read,
    "model.pt": lambda path: _load_checkpoint(nn.Linear(1, 1), path),
    "model.safetensors": lambda path: _load_checkpoint(nn.Linear(1, 1), path),
    "data.json": lambda path: load_records(str(path)),
    "data.jsonl": lambda path: load_records(str(path)),
    "plan.json": lambda path: _plan(str(path)),
    "bundle.json": load_bundle,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_nothing_is_read_but_a_file(tmp_path: Path, name: str, kind: str):
    path = tmp_path / name
    KINDS[kind](path)

    def act() -> None:
        with pytest.raises(RankscopeError) as refused:
            READERS[name](path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)

    assert forked(act, tmp_path / "err") is None


@pytest.mark.parametrize("name", ["gradients.npz", RESULT_FILE])
def test_no_pipe_is_written_to(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)

    def act() -> None:
        if name == RESULT_FILE:
            _write(tmp_path, "{}", {}, None)
        else:
            save(synthetic(GradientKind.NORMAL, 2), tmp_path / name)

    outcome = forked(act, tmp_path / "err")
    assert outcome is None or not outcome.startswith("hang")
    assert (tmp_path / name).is_file()
