"""Ctrl-C at a chosen line of the monitor's, where Python might raise it."""

import sys
from pathlib import Path

import rankscope

_PACKAGE = str(Path(rankscope.__file__).parent)


class Cut:
    """Raises KeyboardInterrupt at one of the monitor's lines in this thread, or counts them."""

    def __init__(self, at=None, *, file="", function=""):
        self.count = 0
        self.cut = False
        self._at, self._file, self._function = at, file, function

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        chosen = path.startswith(_PACKAGE) and self._file in path[len(_PACKAGE) :]
        return self._line if chosen and self._function in ("", name) else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.count += 1
            if self._at is not None and self.count > self._at:
                sys.settrace(None)
                self.cut = True
                raise KeyboardInterrupt
        return self._line
