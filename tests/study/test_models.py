import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import UsageError
from rankscope.lab.study.base import train_tokenizer
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.data import Record
from rankscope.lab.study.encoding import encode
from rankscope.lab.study.models import load_model

RECORDS = [Record(index, **row) for index, row in enumerate(generate(0, 64))]
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory with a model and its own tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM  # a second, for all who collect tests

    tokenizer = train_tokenizer(RECORDS, 300)
    config = LlamaConfig(vocab_size=len(tokenizer), **TINY_LLAMA)
    path = tmp_path / "someones-model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_padding_does_not_change_the_loss(tmp_path: Path) -> None:
    loaded = load_model("tiny", tokenizer_records=RECORDS, cache_dir=tmp_path, base_steps=2)
    samples = encode(RECORDS, loaded.tokenizer, 128)
    positions = [int(samples.lengths.argmin()), int(samples.lengths.argmax())]
    with torch.no_grad():
        alone = [loaded.model(**samples.collate([p])[0]).loss.double() for p in positions]
        together = loaded.model(**samples.collate(positions)[0]).loss.double()
    counts = torch.tensor(
        [float((samples.collate([p])[0]["labels"] >= 0).sum()) for p in positions]
    )
    expected = (torch.stack(alone) * counts).sum() / counts.sum()
    assert float(together) == pytest.approx(float(expected), rel=1e-5)


def test_directory(directory: Path) -> None:
    loaded = load_model(str(directory))
    assert loaded.label == str(directory)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.model.config.use_cache is False
    assert loaded.tokenizer.pad_token_id == 0


def test_remote_code_is_refused(directory: Path, tmp_path: Path) -> None:
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
