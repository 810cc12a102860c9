"""Two ends of a link for two hosts: what ``python -m support.linked_agents`` runs on each.

The root prints a line of JSON for each frame, ``[host, step]``, and at the end for how long the
other host was silent. That one sends numbered frames of 10 kB.
"""

import json
import sys
import time
from pathlib import Path

from rankscope.agent import hosts
from rankscope.agent.hosts import HostLink, RootLink

SECONDS_BETWEEN = 0.02
FRAME_BYTES = 10_000


def run_root(place: Path, address: str | None, master: str) -> None:
    """Serve until a file ``stop`` stands in ``place``."""
    root = RootLink(address, master=master)
    (place / "writing").write_bytes(root.invitation.encode())
    (place / "writing").rename(place / "invitation")
    while not (place / "stop").exists():
        for host, payload in root.poll():
            root.send(host, payload[:8])
            print(json.dumps([host, int(payload[:8])]), flush=True)
        time.sleep(0.005)
    print(json.dumps({"silent": root.silent_seconds(1)}), flush=True)
    root.close()


def run_host(
    place: Path, num_steps: int, most_bytes: int, linger_seconds: float, search_seconds: float
) -> None:
    """Send so many frames, then close the link and print what is known.

    After ``search_seconds`` without an answer, another way is searched.
    """
    hosts.SEARCH_SECONDS = search_seconds
    while not (place / "invitation").exists():
        time.sleep(0.01)
    link = HostLink(1, most_bytes=most_bytes)
    link.open((place / "invitation").read_bytes())
    taken, answers = [], []
    for step in range(num_steps):
        if link.send(b"%08d" % step + b"x" * FRAME_BYTES):
            taken.append(step)
        answers += map(int, link.poll())
        time.sleep(SECONDS_BETWEEN)
    delivered = link.close(linger_seconds)
    print(json.dumps({"delivered": delivered, "taken": taken, "answers": answers}), flush=True)


if __name__ == "__main__":
    role, folder, *rest = sys.argv[1:]
    if role == "root":
        run_root(Path(folder), rest[0] or None, rest[1])
    else:
        run_host(Path(folder), int(rest[0]), int(rest[1]), float(rest[2]), float(rest[3]))
