"""Finds the modules in ``benchmarks/``, which import each other by their bare names."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(name):
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
