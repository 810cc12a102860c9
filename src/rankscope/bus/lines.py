"""Lines of the log without control characters, whoever prints them."""

import logging
import traceback

from rankscope.bus.words import printable

TRACE = "trace"
"""Attribute of a record: the traceback of an error in another process, as words."""


def make_printable(record: logging.LogRecord) -> bool:
    """Replace the control characters of a record; a filter of a logger, which passes all.

    Names and paths that came from a script or a file then move no cursor, ring no bell, and begin
    no line of their own.
    """
    record.msg, record.args = printable(record.getMessage()), ()
    trace = getattr(record, TRACE, "")
    if record.exc_info is not None and record.exc_info[1] is not None:
        trace = "".join(traceback.format_exception(record.exc_info[1]))
    if trace:  # formatters put it below the message
        record.exc_text = "\n".join(map(printable, trace.rstrip().split("\n")))
    return True
