"""The precision of a forward pass, as one number and in words."""

import pytest
import torch

from rankscope.evidence.environment.facts import PrecisionMeter, environment_facts, precision_words

CPU = torch.device("cpu")


def precision_code(module, device):
    return PrecisionMeter(module, device).code(0)


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


def test_it_stays_while_nothing_changes(model):
    code = precision_code(model, CPU)
    assert 0 <= code < 2**63
    assert precision_code(model, CPU) == code
    assert precision_code(torch.nn.Linear(3, 1), CPU) == code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_shows_and_so_does_its_type(model, dtype):
    plain = precision_code(model, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = precision_code(model, CPU)
    with torch.autocast("cpu", dtype):
        code = precision_code(model, CPU)
        assert precision_words(model, CPU)["autocast"] == str(dtype).removeprefix("torch.")
    assert plain not in (in_bf16, code)
    assert (code == in_bf16) == (dtype is torch.bfloat16)
    assert precision_code(model, CPU) == plain


def test_autocast_of_another_kind_of_device_does_not_count(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert precision_words(model, torch.device("cuda"))["autocast"] == "off"
    assert precision_words(model, torch.device("meta"))["autocast"] == "off"


def test_types_of_parameters_show():
    words = [
        precision_words(module, CPU)["parameter_types"]
        for module in (
            torch.nn.Linear(1, 1).bfloat16(),
            torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()),
            torch.nn.ReLU(),
        )
    ]
    assert words == ["bfloat16", "float32, float64", "none"]


def set_deterministic(on):
    torch.use_deterministic_algorithms(on)


def set_benchmark(on):
    torch.backends.cudnn.benchmark = on


def set_cudnn_deterministic(on):
    torch.backends.cudnn.deterministic = on


def set_matmul(on):
    torch.set_float32_matmul_precision("high" if on else "highest")


def set_default(on):
    torch.set_default_dtype(torch.float64 if on else torch.float32)


@pytest.mark.parametrize(
    "switch", [set_deterministic, set_benchmark, set_cudnn_deterministic, set_matmul, set_default]
)
def test_global_settings_show_and_are_only_read(model, switch):
    before = precision_code(model, CPU)
    try:
        switch(True)
        changed = precision_code(model, CPU)
    finally:
        switch(False)
    assert changed != before
    assert precision_code(model, CPU) == before


def test_saying_what_is_the_default_changes_nothing(model):
    before = precision_code(model, CPU)
    torch.set_float32_matmul_precision("highest")
    assert precision_code(model, CPU) == before


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
@pytest.mark.parametrize(
    "backend", [torch.backends.cuda.matmul, torch.backends], ids=["matmul alone", "all backends"]
)
def test_it_can_be_read_where_only_the_new_settings_of_tf32_are_used(model, backend):
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


def test_a_forward_pass_sees_the_autocast_around_it(model):
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(precision_code(module, CPU)))
    model(torch.ones(1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 2))
    assert seen[0] == precision_code(model, CPU)
    assert seen[1] != seen[0]
