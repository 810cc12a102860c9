"""Runs a script or ``-m module`` whose loss counts eightfold on rank 1, before backward."""

import os
import runpy
import sys
from pathlib import Path

import torch

if os.environ["RANK"] == "1":
    backward = torch.Tensor.backward

    def eightfold(loss, *arguments, **options):
        return backward(loss * 8, *arguments, **options)

    torch.Tensor.backward = eightfold

_, *words = sys.argv
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
