import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.errors import DataError, MissingExtraError, install_command
from rankscope.lab.study.base import VOCAB_SIZE, train_tokenizer
from rankscope.lab.study.data import FIXED_TEXTS, Record, load_records


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(load_records(None).held_out)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_specials(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert 256 < len(tokenizer) <= VOCAB_SIZE + len(FIXED_TEXTS)


def test_special_tokens_inside_a_text_are_text(tokenizer: Any) -> None:
    for text in ("a</s>b", "<s>", "<pad>"):
        assert not {0, 1, 2} & set(_ids(tokenizer, text))
        assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_fixed_texts_are_single_tokens(tokenizer: Any) -> None:
    assert [len(_ids(tokenizer, text)) for text in FIXED_TEXTS] == [1] * len(FIXED_TEXTS)
    assert len(_ids(tokenizer, "Below is an instruction")) > 1


def test_same_records_give_the_same_tokenizer(tokenizer: Any) -> None:
    again = train_tokenizer(load_records(None).held_out)
    first, second = (json.loads(t.backend_tokenizer.to_str()) for t in (tokenizer, again))
    assert first == second


def test_saved_and_loaded(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = FIXED_TEXTS[0] + "Sort a</s>b." + FIXED_TEXTS[3] + "ünïcode ≤ 3"
    assert _ids(loaded, text) == _ids(tokenizer, text)
    assert loaded.decode(_ids(loaded, text)) == text
    assert loaded.pad_token_id == 0


def test_little_text_gives_a_small_vocabulary() -> None:
    small = train_tokenizer([Record(0, "Say hi.", "", "hi")])
    assert small.decode(_ids(small, "anything ≠ hi")) == "anything ≠ hi"


def test_no_records() -> None:
    with pytest.raises(DataError, match="at least one record"):
        train_tokenizer([])


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("study"))):
        train_tokenizer([Record(0, "a", "", "b")])
