"""Data for the tests of the study's ingredients."""

import json
import os
from pathlib import Path

import pytest

from rankscope.lab.study.builtin import generate


@pytest.fixture(scope="session")
def alpaca_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Alpaca file where there is one, else a generated file of its format and quirks."""
    beside = Path(__file__).parents[3] / "shared" / "data" / "alpaca_data.json"
    real = Path(os.environ.get("RANKSCOPE_ALPACA", beside))
    if real.is_file():
        return real
    rows = list(generate(7, 5000))
    for index in (40, 900, 3000):
        rows[index]["output"] = ""
    path = tmp_path_factory.mktemp("data") / "alpaca_data.json"
    path.write_text(json.dumps(rows))
    return path
