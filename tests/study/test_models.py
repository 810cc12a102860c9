import json

import pytest
import sentencepiece
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rankscope.errors import UsageError
from rankscope.lab.study import base, models
from rankscope.lab.study.base import BaseConfig, cache_key, load_base, train_tokenizer
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.data import Record, load_records
from rankscope.lab.study.encoding import encode
from rankscope.lab.study.models import build_pangu, load_model
from support.ranks import forked

RECORDS = [Record(index, **row) for index, row in enumerate(generate(0, 64))]
TINY_LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture
def directory(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM  # a second, for all who collect tests

    tokenizer = train_tokenizer(RECORDS, 300)
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **TINY_LLAMA)
    path = tmp_path / "someones-model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_padding_does_not_change_the_loss(tmp_path):
    loaded = load_model("tiny", tokenizer_records=RECORDS, cache_dir=tmp_path, base_steps=2)
    samples = encode(RECORDS, loaded.tokenizer, 128)
    positions = [int(samples.lengths.argmin()), int(samples.lengths.argmax())]
    with torch.no_grad():
        alone = [loaded.model(**samples.collate([p])[0]).loss.double() for p in positions]
        together = loaded.model(**samples.collate(positions)[0]).loss.double()
    counts = torch.tensor([(samples.collate([p])[0]["labels"] >= 0).sum() for p in positions])
    expected = (torch.stack(alone) * counts).sum() / counts.sum()
    assert float(together) == pytest.approx(float(expected), rel=1e-5)


def test_directory(directory):
    loaded = load_model(str(directory))
    assert loaded.label == str(directory)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.model.config.use_cache is False
    assert loaded.tokenizer.pad_token_id == 0


def test_remote_code_is_refused(directory, tmp_path):
    ran = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = "never-heard-of"
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(str(directory))
    assert not ran.exists()


# The published model ----------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    config = models.pangu_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = 2100, 48, 64
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
    config.head_dim = 16
    monkeypatch.setattr(models, "pangu_config", lambda: config)
    return config


@pytest.fixture
def published(small, tmp_path):
    from transformers import LlamaForCausalLM  # a second, for all who collect tests

    torch.manual_seed(3)
    model = LlamaForCausalLM(small).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    tensors = dict(model.named_parameters())
    names = sorted(tensors)
    folder = tmp_path / "published"
    folder.mkdir()
    for shard in range(2):
        part = {name: tensors[name].detach().contiguous() for name in names[shard::2]}
        save_file(part, folder / f"model-{shard}.safetensors")
    train_tokenizer(RECORDS, 300).save_pretrained(folder)
    return folder, model.float()


def _sentencepiece(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    text = folder.parent / "text"
    text.write_text("\n".join(record.output for record in RECORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols="[unused10]",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_size_of_the_real_architecture():
    with torch.device("meta"):
        model = build_pangu()
    hidden, heads, key_values, mlp = 1536, 12 * 128, 6 * 128, 6144
    attention = 2 * (hidden * heads + heads) + 2 * (hidden * key_values + key_values)
    block = attention + 3 * hidden * mlp + 2 * hidden
    expected = 153_376 * hidden + 26 * block + hidden
    assert sum(p.numel() for p in model.parameters()) == expected
    assert expected == pytest.approx(1.156e9, rel=5e-4)
    config = model.config
    assert config.rope_parameters["rope_theta"] == 4e6
    assert config.rms_norm_eps == 1e-5


def test_published_weights_compute_what_they_did(published):
    folder, original = published
    loaded = load_model("pangu-1b", weights=folder)
    assert loaded.label == "pangu-1b (weights from published)"
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.num_parameters == sum(p.numel() for p in original.parameters())
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens).logits, original(tokens).logits)
    model = loaded.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_sentencepiece_tokenizer(published, tmp_path):
    folder, _ = published
    processor = _sentencepiece(folder)
    roles = {"eos_token": "[unused10]", "bos_token": {"content": "<s>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, "auto_map": {"a": "b"}}))
    tokenizer = load_model("pangu-1b", weights=folder).tokenizer
    assert tokenizer.eos_token_id == processor.piece_to_id("[unused10]")
    assert tokenizer.bos_token_id == processor.bos_id()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    for record in RECORDS[:10]:
        ids = tokenizer([record.output], add_special_tokens=False)["input_ids"][0]
        assert ids == processor.encode(record.output)
    encoded = encode(RECORDS, tokenizer, 512)
    assert (encoded.tokens[encoded.starts[1:] - 1] == tokenizer.eos_token_id).all()
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.model").is_file()


SMALL = BaseConfig(hidden=32, layers=1, intermediate=64, vocab_size=400, batch_size=4)


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
    assert _bits(_load(tmp_path)) == queue.get(timeout=240) == _bits(_load(tmp_path))
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
