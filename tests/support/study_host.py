"""Runs commands of ``rankscope`` one after the other in one process, without a study's figures.

A study imports torch and transformers, and so does the process that its workers are forked from.
Where a test is not about how a process starts or ends, it need not do so again.

Reads a command from each line of its input, as JSON, and answers with the exit code.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest.mock import patch

SECONDS = 240.0


class Host:
    """A process that has to be used already where only a study's own processes may end with it."""

    def __init__(self, folder, environment):
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
            env=environment,
            pass_fds=[answering],
            start_new_session=True,
        )
        self.pid, self.closed = self._process.pid, False
        os.close(answering)

    def begin(self, words):
        for file in self._printed:
            file.truncate(0)
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def interrupt(self):
        """Send SIGINT to all processes, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self):
        """Send SIGTERM to the process that launched the workers, and to nothing else."""
        os.kill(self.pid, signal.SIGTERM)

    def wait_until(self, condition):
        """Wait until a condition holds while the command runs; it must not end before."""
        end = time.monotonic() + SECONDS
        while not condition():
            if self._has_ended(0.02) or time.monotonic() > end:
                self._process.kill()
                raise AssertionError(f"it never held; the command said:\n{_read(self._printed[1])}")

    def finish(self):
        """Wait for the end of the command; return its exit code and what it printed.

        No process of it may be left.
        """
        answer = self._answers.readline() if self._has_ended(SECONDS) else ""
        out, err = map(_read, self._printed)
        if not answer:
            self._process.kill()
            raise AssertionError(f"the command hangs or has killed its process; it said:\n{err}")
        end = time.monotonic() + SECONDS
        while left := self._workers():
            assert time.monotonic() < end, f"the command left processes behind: {left}"
            time.sleep(0.02)
        return subprocess.CompletedProcess([], int(answer), out, err)

    def close(self):
        """Let the process end; return its exit code and what the last command said."""
        self._process.stdin.close()
        code, said = self._process.wait(), _read(self._printed[1])
        for file in (self._answers, *self._printed):
            file.close()
        self.closed = True
        return code, said

    def _has_ended(self, seconds):
        return bool(select.select([self._answers], [], [], seconds)[0])

    def _workers(self):
        """Return the processes of its group that are neither this one nor its children.

        Its children are those that multiprocessing keeps for all commands.
        """
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
        return {
            pid
            for pid in pids
            if _group_of(pid) == self.pid and self.pid not in (pid, _parent(pid))
        }


def _group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _read(file):
    file.seek(0)
    return file.read()


def _run(words):
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


def _serve(answers):
    for line in sys.stdin:
        code = _run(json.loads(line))
        sys.stdout.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    _serve(os.fdopen(int(sys.argv[1]), "w"))
