import logging

import pytest


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "rankscope")
    return lambda: [record.getMessage() for record in caplog.records]
