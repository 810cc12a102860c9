"""State files: what is in them comes back, and what is not a state is refused."""

import io

import numpy as np
import pytest

from rankscope.record import RunWriter
from rankscope.record import states as files
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, read_state, unpack_state
from rankscope.stats.state import StateError
from record.step_reports import files_of

STATE = {
    "numbers": [1, -2.5, float("-inf"), True, None, "text/with ünicode"],
    "array": np.array([[2.0**-1074, np.nan], [-0.0, np.inf]]),
    "nested": {"pairs": [[np.arange(3, dtype=np.int8), np.zeros((0, 2), bool)]], "": {}},
}


def test_a_state_comes_back():
    read = unpack_state(pack_state(STATE))
    assert read["numbers"] == STATE["numbers"]
    assert read["array"].tobytes() == STATE["array"].tobytes()
    keys, flags = read["nested"]["pairs"][0]
    assert (keys.dtype, keys.tolist()) == (np.int8, [0, 1, 2])
    assert (flags.dtype, flags.shape) == (bool, (0, 2))
    assert read["nested"][""] == {}


def archive(**members):
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def test_a_damaged_or_foreign_file_is_no_state(tmp_path, monkeypatch):
    whole = pack_state(STATE)
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0x40
    pickled = io.BytesIO()
    np.savez(pickled, tree=np.array([{"a": 1}], object))
    text = np.frombuffer(b'{"format": 1}', np.uint8)
    for content in (
        b"",
        b"no archive",
        whole[: len(whole) // 2],
        bytes(flipped),
        pickled.getvalue(),
        archive(),
        archive(tree=np.zeros(3)),
        archive(tree=text),
    ):
        with pytest.raises(StateError, match="it is damaged"):
            unpack_state(content)
    with pytest.raises(StateError, match="it cannot be read"):
        read_state(tmp_path)
    assert read_state(tmp_path / "nothing") is None
    monkeypatch.setattr(files, "STATE_FORMAT", 2)
    with pytest.raises(StateError, match="another release"):
        unpack_state(whole)


def test_a_run_holds_the_state_it_began_with_and_the_last_one(tmp_path):
    writer = RunWriter(tmp_path / "run", {}, start={"step": 6})
    assert files_of(writer.path) == [START_FILE, "run.json"]
    for step in (7, 8):
        writer.save_state(lambda step=step: {"step": step})
    assert read_state(writer.path / STATE_FILE) == {"step": 8}
    writer.close()
    writer.save_state(lambda: {"step": 9}, at_end=True)  # too late
    assert read_state(writer.path / STATE_FILE) == {"step": 8}
    assert read_state(writer.path / START_FILE) == {"step": 6}
