import re
from collections.abc import Callable
from itertools import pairwise

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


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def _sum(row: dict[str, str]) -> bool:
    return _numbers(row["output"])[-1] == sum(_numbers(row["input"]))


def _alphabetical(row: dict[str, str]) -> bool:
    words = row["output"].split(", ")
    return all(a <= b for a, b in pairwise(words)) and {*words} == {*row["input"].split(", ")}


def _continued(row: dict[str, str]) -> bool:
    numbers = _numbers(row["input"]) + _numbers(row["output"])
    return len({b - a for a, b in pairwise(numbers)}) == 1


@pytest.mark.parametrize(
    ("instruction", "correct"),
    [
        ("Add the two numbers", _sum),
        ("alphabetically", _alphabetical),
        ("Continue the sequence", _continued),
    ],
)
def test_answers_are_correct(
    rows: Rows, instruction: str, correct: Callable[[dict[str, str]], bool]
) -> None:
    concerned = [row for row in rows if instruction in row["instruction"]]
    assert len(concerned) > 50
    assert all(map(correct, concerned))
