"""Runs commands of ``rankscope`` one after the other in one process, without a study's figures.

A study imports torch and transformers, and so does the process that its workers are forked from.
Where a test is not about how a process starts or ends, it need not do so again.

Reads a command from each line of its input, as JSON, and answers with the exit code.
"""

import json
import os
import select
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest.mock import patch


class Host:
    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        # Appended to and cut: workers inherit these two files from the first command.
        self._printed = [(folder / name).open("a+") for name in ("out", "err")]
        answers, answering = os.pipe()
        self._answers = os.fdopen(answers)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(answering)],
            stdin=subprocess.PIPE,
            stdout=self._printed[0],
            stderr=self._printed[1],
            text=True,
            env=dict(environment),
            pass_fds=[answering],
            start_new_session=True,
        )
        self.pid = self._process.pid
        os.close(answering)
        weakref.finalize(self, _end, self._process, self._answers, self._printed)

    def run(self, words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        self.begin(words)
        return self.end(words, seconds)

    def begin(self, words: Sequence[str]) -> None:
        for file in self._printed:
            file.truncate(0)
        assert self._process.stdin
        self._process.stdin.write(json.dumps(list(words)) + "\n")
        self._process.stdin.flush()

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait for the end of the command; return whether it has ended."""
        return bool(select.select([self._answers], [], [], seconds)[0])

    def end(self, words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the command and return its exit code and what it printed."""
        answer = self._answers.readline() if self.has_ended(seconds) else ""
        out, err = (_read(file) for file in self._printed)
        if not answer:
            self._process.kill()
            raise AssertionError(f"the command hangs or has killed its process; it said:\n{err}")
        return subprocess.CompletedProcess(list(words), int(answer), out, err)

    def workers(self) -> set[int]:
        """Return the processes of its group that are neither this one nor its children.

        Its children are those that multiprocessing keeps for all commands.
        """
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
        return {
            pid
            for pid in pids
            if _group_of(pid) == self.pid and self.pid not in (pid, _parent(pid))
        }

    def close(self) -> tuple[int, str]:
        """Let the process end; return its exit code and what the last command said."""
        assert self._process.stdin
        self._process.stdin.close()
        return self._process.wait(), _read(self._printed[1])


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _end(process: "subprocess.Popen[str]", *files: IO[str] | list[IO[str]]) -> None:
    assert process.stdin
    process.stdin.close()
    process.wait()
    for one in files:
        for file in one if isinstance(one, list) else [one]:
            file.close()


def _run(words: list[str]) -> int:
    from rankscope.cli import main, study

    sys.argv = ["rankscope", *words]
    try:
        with patch.object(study, "_write_report", return_value=""):
            main.run()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    return 1


def _serve(answers: IO[str]) -> None:
    for line in sys.stdin:
        code = _run(json.loads(line))
        sys.stdout.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    _serve(os.fdopen(int(sys.argv[1]), "w"))
