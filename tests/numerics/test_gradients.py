import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import DataError
from rankscope.lab.numerics.gradients import GradientKind, read, save, synthetic
from support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_gradients_survive_saving(tmp_path):
    made = synthetic(GradientKind.NORMAL, 3, num_elements=50)
    save(made, tmp_path / "new" / "g.npz")
    back = read(tmp_path / "new" / "g.npz")
    assert (back.kind, back.name) == ("file", "g.npz")
    assert list(back.arrays) == list(made.arrays)
    for name, array in made.arrays.items():
        assert back.arrays[name].dtype == np.float32
        assert np.array_equal(back.arrays[name], array)


def test_one_array_and_other_shapes_and_types_are_read(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 4, 5))
    np.save(tmp_path / "g.npy", values)
    np.savez(tmp_path / "h.npz", w=values.astype(np.float16), b=values[:, 0])
    single, several = read(tmp_path / "g.npy"), read(tmp_path / "h.npz")
    assert np.array_equal(single.arrays["g"], values.reshape(3, 20).astype(np.float32))
    assert {name: own.shape for name, own in several.arrays.items()} == {"w": (3, 20), "b": (3, 5)}


def overwrite(path, at, local, central=b""):
    """Write other bytes at a place of an archive, or of both headers of its array."""
    data = bytearray(path.read_bytes())
    data[at : at + len(local)] = local
    if central:
        header = data.index(b"PK\x01\x02") + at + 2
        data[header : header + len(central)] = central
    path.write_bytes(data)


NO_ARRAYS = "does not hold numpy arrays"
BAD = {
    r"array 'a': expected gradients of at least 2 workers .* \[1, 5\]": {"a": np.ones((1, 5))},
    "expected floating-point numbers, got int64": {"a": np.ones((2, 5), int)},
    "got nan as element 1 of worker 1": {"a": np.array([[1.0, 2.0], [3.0, np.nan]])},
    "holds no array": {},
    NO_ARRAYS: {"a": np.array([[None, {}], [1, 2]], dtype=object)},
}
DAMAGE = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "damaged": lambda path: overwrite(path, 200, b"\xff" * 40),
    "encrypted": lambda path: overwrite(path, 6, b"\x01", b"\x01"),
}


def refused(path, message):
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_an_error_that_helps(tmp_path, message):
    np.savez(tmp_path / "g.npz", **BAD[message])
    refused(tmp_path / "g.npz", message)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_damaged_file_holds_no_arrays(tmp_path, damage):
    path = tmp_path / "g.npz"
    refused(path, "there is no file")
    np.savez_compressed(path, a=np.random.default_rng(0).standard_normal((2, 500)))
    DAMAGE[damage](path)
    refused(path, NO_ARRAYS)


def snippet():
    codes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    [code] = [each for each in codes if "def save_local_gradients" in each]
    names = {}
    exec(code, names)
    return names["save_local_gradients"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(3, 2)
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x)).square().mean()


def make(rank):
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + rank))


def save_on_ranks(rank, path):
    model, batch = make(rank)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp(batch).backward()  # what a step before has left must not be saved
    snippet()(ddp, lambda: ddp(batch).backward(), path)
    return [parameter.grad is None for parameter in model.parameters()]


@pytest.mark.ranks
def test_the_snippet_of_the_page_saves_what_each_rank_computed(tmp_path):
    path = tmp_path / "g.npz"
    assert all(all(gone) for gone in run_ranks(save_on_ranks, 2, str(path)))
    gradients = read(path)
    assert list(gradients.arrays) == ["used.weight", "used.bias", "unused.weight", "unused.bias"]
    for rank in range(2):
        model, batch = make(rank)
        model(batch).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert np.array_equal(gradients.arrays[name][rank], own.flatten().numpy())
    assert not np.array_equal(*gradients.arrays["used.weight"])
