from typing import Any

import pytest

from rankscope.errors import UsageError
from rankscope.lab.study.config import Setting, StudyConfig
from rankscope.verdict.coverage import checks_of, missing_steps


def test_the_default_steps_complete_every_check() -> None:
    config = StudyConfig()
    checks = checks_of(config.workers, {})
    assert missing_steps(checks, config.steps) == 0
    assert missing_steps(checks, config.steps - 1) == 1


def test_seeds_of_the_settings() -> None:
    assert {Setting.S1_1.seed_of(rank, 5) for rank in range(8)} == {5}
    odd, *others = (Setting.S1_2.seed_of(rank, 5) for rank in range(8))
    assert odd != 5
    assert set(others) == {5}
    assert len({Setting.S1_3.seed_of(rank, 5) for rank in range(1024)}) == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 1}, "--workers must be at least 2, got 1"),
        ({"max_length": 1}, "--max-length must be at least 2 tokens, got 1"),
        ({"seed": -1}, "--seed must be between 0 and"),
        ({"learning_rate": -1.0}, "--learning-rate must be a positive number, got -1.0"),
        ({"weights": "/"}, "--weights loads into --model pangu-1b only, got --model tiny"),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StudyConfig(**options)
