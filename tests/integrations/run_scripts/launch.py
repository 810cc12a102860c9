"""A launcher that imports nothing: how many ranks, the script, and its arguments."""

import os
import socket
import subprocess
import sys


def main():
    with socket.create_server(("localhost", 0)) as place:
        port = str(place.getsockname()[1])
    _, count, *command = sys.argv
    told = {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(int(count))
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
