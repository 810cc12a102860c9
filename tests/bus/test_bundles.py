import resource
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from rankscope.bus.bundles import PlainBatch, ReplayBundle, find_bundles, load_bundle, save_bundle
from rankscope.bus.finding import Finding, Severity
from rankscope.errors import RunError
from rankscope.files import archive_of
from support.limited import forked

SUSPECT = PlainBatch(
    {"tuple": [{"tensor": 0, "dtype": "bfloat16", "host": False}, {"float": "nan"}]},
    (np.array([[1, -2], [3, 4]], np.int16),),
    np.array([7, -(2**63)]),
)
PEER = PlainBatch({"dict": []}, (np.array(3.5), np.array(["é"])))
FINDING = Finding(
    "rank 1/odd", "data.worker_outlier", Severity.WARNING, (1,), 3, 9, "It is.", "Go."
)


def bundle(**other) -> ReplayBundle:
    fields = {
        "reason": "rank 1/odd",
        "step": 66,
        "suspect": 1,
        "peer": 0,
        "num_workers": 2,
        "seed": 99,
        "autocast": "bfloat16",
        "batches": (SUSPECT, PEER),
        "finding": FINDING,
        "versions": {"torch": "2.13"},
    }
    return ReplayBundle(**{**fields, **other})


def assert_same_batch(one: PlainBatch, other: PlainBatch) -> None:
    assert one.structure == other.structure
    assert one.samples.tolist() == other.samples.tolist()
    assert len(one.arrays) == len(other.arrays)
    for a, b in zip(one.arrays, other.arrays, strict=True):
        assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())


def test_a_bundle_comes_back_as_it_was(tmp_path):
    path = save_bundle(tmp_path, bundle())
    assert path == tmp_path / "replay" / "rank-1-odd-step-66"
    assert {file.name for file in path.iterdir()} == {"bundle.json", "peer.npz", "suspect.npz"}
    for place in (path, path / "bundle.json"):
        back = load_bundle(place)
        for one, other in zip((SUSPECT, PEER), back.batches, strict=True):
            assert_same_batch(one, other)
        assert replace(back, batches=(SUSPECT, PEER), versions={}) == bundle(versions={})
        assert back.versions["torch"] == "2.13"
        assert "numpy" in back.versions
    assert find_bundles(tmp_path) == [path]


def test_nothing_is_ever_pickled(tmp_path):
    path = save_bundle(tmp_path, bundle())
    np.savez(path / "peer.npz", samples=np.empty(0, np.int64), **{"array-0": np.array([{}])})
    with pytest.raises(RunError, match=r"peer\.npz.*damaged"):
        load_bundle(path)


def test_a_folder_without_a_bundle_leads_to_those_that_there_are(tmp_path):
    with pytest.raises(RunError, match=r"holds no replay bundle .*: name a directory under RUN"):
        load_bundle(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="has no saved batches to replay"):
        load_bundle(tmp_path)
    path = save_bundle(tmp_path, bundle())
    with pytest.raises(RunError, match=f"there are {path}"):
        load_bundle(tmp_path)


def test_what_an_interrupted_write_has_left_is_no_bundle(tmp_path):
    left = tmp_path / "replay" / f".{bundle().name}.tmp"
    left.mkdir(parents=True)
    (left / "suspect.npz").write_bytes(b"half")
    assert find_bundles(tmp_path) == []
    path = save_bundle(tmp_path, bundle())
    assert find_bundles(tmp_path) == [path]
    assert not left.exists()


def zipped(shape: str, content: bytes, times: int = 1) -> bytes:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    file = BytesIO(archive_of({"samples": np.arange(2)}))
    with (
        zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("array-0.npy", "w") as array,
    ):
        array.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
        for _ in range(times):  # piece by piece: the memory of this process is looked at
            array.write(content)
    return file.getvalue()


def archived(**arrays) -> bytes:
    return archive_of({"samples": np.arange(2), "array-0": np.ones(2), **arrays})


ENTRY = b"PK\x01\x02\x2d\x03\x2d\0"
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "half of one": lambda: archived()[:300],
    "a password": lambda: archived().replace(ENTRY + b"\0", ENTRY + b"\1"),
    "more than there is": lambda: zipped("(1000000000, 1000000)", bytes(8)),
    "a negative shape": lambda: zipped("(-2, 2)", bytes(8)),
    "a bomb": lambda: zipped("(100000000,)", bytes(4_000_000), 100),
    "no samples": lambda: archive_of({"array-0": np.ones(2)}),
    "samples of text": lambda: archived(samples=np.array(["a"])),
    "a table of samples": lambda: archived(samples=np.ones((2, 2), np.int64)),
}


@pytest.mark.parametrize("content", ARCHIVES)
def test_archives_that_hold_no_batch_are_refused_in_one_line(tmp_path, content):
    path = save_bundle(tmp_path, bundle())
    (path / "peer.npz").write_bytes(ARCHIVES[content]())

    def act() -> None:
        with pytest.raises(RunError, match=r"peer\.npz.*the bundle is damaged") as refused:
            load_bundle(path)
        assert "\n" not in str(refused.value)
        assert ("more than 256 MiB" in str(refused.value)) is (content == "a bomb")
        assert len(str(refused.value)) < len(str(path)) + 300
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100 * 2**10

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert forked(act, tmp_path / "err") is None
