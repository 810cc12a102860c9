from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.lab.study.base import train_tokenizer
from rankscope.lab.study.data import load_records


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


def test_special_tokens_inside_a_text_are_text(tokenizer: Any) -> None:
    for text in ("a</s>b", "<s>", "<pad>"):
        assert not {0, 1, 2} & set(_ids(tokenizer, text))
        assert tokenizer.decode(_ids(tokenizer, text)) == text
