import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.lab.study import base
from rankscope.lab.study.base import BaseConfig, cache_key, load_base, train_tokenizer
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.data import Record, load_records
from support.ranks import forked

SMALL = BaseConfig(hidden=32, layers=1, intermediate=64, vocab_size=400, batch_size=4)
RECORDS = [Record(index, **row) for index, row in enumerate(generate(0, 64))]


def _bits(model):
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def _load(cache, records=RECORDS, **options):
    chosen = {"seed": 0, "steps": 3, "config": SMALL, **options}
    return load_base(records, cache_dir=cache, **chosen)[0]


def _load_in_process(cache, together, queue):
    together.wait()
    queue.put(_bits(_load(cache)))


def test_second_load_reads_the_cache(tmp_path, monkeypatch):
    first = _bits(_load(tmp_path))
    monkeypatch.setattr(base, "train", lambda *_: pytest.fail("trained again"))
    assert _bits(_load(tmp_path)) == first
    assert [path.name for path in tmp_path.iterdir()] == [cache_key(RECORDS, 0, 3, SMALL)]


def test_the_same_seed_gives_the_same_bits(tmp_path):
    first = _bits(_load(tmp_path / "a"))
    threads = torch.get_num_threads()
    torch.manual_seed(99)
    torch.set_num_threads(2)
    try:
        assert _bits(_load(tmp_path / "b")) == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert _bits(_load(tmp_path / "a", seed=1)) != first


@pytest.mark.parametrize("damage", ["config.json", "cut"])
def test_a_damaged_entry_is_made_anew(tmp_path, damage):
    first = _bits(_load(tmp_path))
    entry = tmp_path / cache_key(RECORDS, 0, 3, SMALL)
    if damage == "cut":
        weights = entry / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        (entry / damage).unlink()
    assert _bits(_load(tmp_path)) == first
    assert (entry / "config.json").is_file()
    assert (entry / "tokenizer.json").is_file()


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    context = forked()
    together, queue = context.Barrier(2), context.Queue()
    other = context.Process(target=_load_in_process, args=(tmp_path, together, queue))
    other.start()
    together.wait(timeout=240)
    ours = _bits(_load(tmp_path))
    assert ours == queue.get(timeout=240) == _bits(_load(tmp_path))
    other.join()
    assert [path.name for path in tmp_path.iterdir()] == [cache_key(RECORDS, 0, 3, SMALL)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(load_records(None).held_out)


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives(tokenizer, text):
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_special_tokens_inside_a_text_are_text(tokenizer):
    for text in ("a</s>b", "<s>", "<pad>"):
        assert not {0, 1, 2} & set(_ids(tokenizer, text))
        assert tokenizer.decode(_ids(tokenizer, text)) == text
