"""The command as ``torchrun`` starts it, on a machine whose last rank never gets to it."""

import os
import sys
import time

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    time.sleep(600)

from rankscope.cli.main import run

sys.argv = ["rankscope", "doctor", *sys.argv[1:]]
run()
