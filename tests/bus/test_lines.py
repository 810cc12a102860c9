"""Lines of the log: without control characters, whichever handler prints them."""

import io
import logging

import pytest

from rankscope.bus.words import TRACE, make_printable


@pytest.fixture
def heard():
    logger = logging.Logger("lines")
    logger.addFilter(make_printable)
    logger.addFilter(make_printable)
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    return logger, stream


def test_a_traceback_keeps_its_lines_and_loses_its_control_characters(heard):
    logger, stream = heard
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        logger.exception("it failed\n")
    first, *trace, last = stream.getvalue().splitlines()
    assert first == "it failed "
    assert trace[0] == "Traceback (most recent call last):"
    assert last == "ValueError: bad [2J"


def test_a_traceback_of_another_process_stands_below_the_message(heard):
    logger, stream = heard
    logger.warning("%s", "one\ntwo", extra={TRACE: "Traceback:\n  a\x07\n"})
    logger.warning("%s", "three", extra={TRACE: ""})
    assert stream.getvalue() == "one two\nTraceback:\n  a \nthree\n"
