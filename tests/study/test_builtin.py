import pytest

from rankscope.lab.study.builtin import generate

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return list(generate(0))


def test_six_thousand_different_questions_with_answers(rows: Rows) -> None:
    assert len(rows) == 6000
    assert len({(row["instruction"], row["input"]) for row in rows}) == 6000
    assert all(row["instruction"].strip() and row["output"].strip() for row in rows)
    assert all(set(row) == {"instruction", "input", "output"} for row in rows)
