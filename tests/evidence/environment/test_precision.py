"""The precision of a forward pass, as one number and in words."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.wrappers.facts import PrecisionMeter, environment_facts, precision_words
from support.loops import train_watched
from support.ranks import run_ranks

CPU = torch.device("cpu")


def precision_code(module, device):
    return PrecisionMeter(module, device).code(0)


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


def test_autocast_shows_and_so_does_its_type(model):
    plain = precision_code(model, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = precision_code(model, CPU)
    with torch.autocast("cpu", torch.float16):
        code = precision_code(model, CPU)
        assert precision_words(model, CPU)["autocast"] == "float16"
    assert len({plain, in_bf16, code}) == 3
    assert precision_code(model, CPU) == plain


def test_it_can_be_read_where_old_and_new_settings_of_tf32_are_mixed(model):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        matmul.fp32_precision = "ieee"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32  # what reading it the old way would do
        assert precision_words(model, CPU)["tf32_matmul"] == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
    assert precision_words(model, CPU)["tf32_matmul"] == "ieee"


@pytest.fixture
def untouched():
    """Settings as they are in a new process, which those of a single backend keep others from."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [matmul.fp32_precision for matmul in matmuls]
    for matmul in matmuls:
        matmul.fp32_precision = "none"
    yield
    for matmul, precision in zip(matmuls, before, strict=True):
        matmul.fp32_precision = precision


@pytest.mark.usefixtures("untouched")
def test_it_can_be_read_where_only_the_new_settings_of_tf32_are_used(model):
    backend = torch.backends.cuda.matmul
    code, before = precision_code(model, CPU), backend.fp32_precision
    try:
        backend.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        words = precision_words(model, CPU)
        assert (words["float32_matmul"], words["tf32_matmul"]) == ("mixed", "tf32")
        assert precision_code(model, CPU) == precision_code(model, CPU) != code
        assert environment_facts(CPU)["tf32_matmul"] == "tf32"
    finally:
        backend.fp32_precision = before
    assert precision_code(model, CPU) == code


def train_with_another_kernel(rank, run_dir):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(step):
        with sdpa_kernel(SDPBackend.MATH) if rank == 1 else nullcontext():
            return model(torch.randn(4, 2)).square().mean()

    train_watched(model, optimizer, run_dir, 5, loss_of)


@pytest.mark.ranks
def test_settings_around_the_forward_pass_of_one_rank_are_named(tmp_path):
    run_ranks(train_with_another_kernel, 3, str(tmp_path / "run"))
    [found] = [f for f in Run.open(tmp_path / "run").findings() if f.cause == "env.mismatch"]
    assert found.ranks == (1,)
    assert "in the forward pass of rank 1, attention backends: math on rank 1" in found.explanation
    assert "autocast" not in found.explanation
    assert "sdpa_kernel" in found.next_check
