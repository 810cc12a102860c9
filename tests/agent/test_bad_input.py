"""Odd places in which an agent has to start; torch is not needed for that."""

import subprocess
import sys
import zipfile
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"

GREET = """
import json, os, select, sys, time
sys.path[:0] = sys.argv[1:]
os.makedirs("gone"), os.chdir("gone"), os.rmdir("../gone")
os.environ["TMPDIR"] = os.environ["HOME"] = "/proc/1"
os.environ["PYTHONHOME"] = "/nowhere"
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.link import Link, connect, listen, start_agent

listening, address = listen()
numbers = listening.fileno()
started = start_agent(listening, "password", thread=False)
hello = pack(FrameKind.HELLO, json.dumps({"rank": 0, "secret": "password"}).encode(), rank=0)
link = Link(lambda: connect(address), hello)
frames = link.wait(30.0)
assert [frame.kind for frame in frames] == [FrameKind.WELCOME], frames
assert int(frames[0].payload) == started.pid, frames
assert os.getsid(started.pid) == started.pid  # Ctrl-C in the terminal does not reach it
print(numbers, open(f"/proc/{started.pid}/environ").read().count("VISIBLE_DEVICES=\\0"))
link.close()
started.wait(10.0)
assert started._process.poll() is not None
"""


def test_an_agent_starts_wherever_a_training_does(tmp_path):
    """From a zip, beside files that shadow the library, without standard input, home or folder."""
    with zipfile.ZipFile(tmp_path / "rankscope.zip", "w") as archive:
        for path in sorted((SRC / "rankscope").rglob("*")):
            if path.suffix != ".pyc":
                archive.write(path, path.relative_to(SRC))
    shadows = tmp_path / "script"
    shadows.mkdir()
    for name in ("queue", "selectors", "hmac", "random", "numbers", "traceback"):
        (shadows / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    known = "import queue, selectors, hmac, random, traceback, subprocess, socket, tempfile\n"
    (tmp_path / "greet.py").write_text(known + GREET)  # as if the training had them already
    words = [sys.executable, "-I", "greet.py", str(shadows), str(tmp_path / "rankscope.zip")]
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr
    descriptor, hidden = done.stdout.split()
    assert descriptor == "0"  # that of the socket, where standard input was
    assert hidden == "2"
