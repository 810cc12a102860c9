import subprocess
import sys


def test_no_column_imports_pandas():
    """Its import takes most of a second, which the training would spend in waiting for the lock."""
    work = """
import sys, numpy as np
from rankscope.bus.evidence import DType
from rankscope.record.writer import GrowingPart
from rankscope.record.schema import pa, to_arrow, to_arrow_lists
cells = [np.array([1.0, np.nan]), np.array([])]
columns = {
    "float": to_arrow(np.array([1.0, np.nan]), DType.FLOAT),
    "int": to_arrow(np.array([1.0, np.nan]), DType.INT),
    "bool": to_arrow(np.array([True, False]), DType.BOOL),
    "text": to_arrow(np.array(["a", "b"], object), DType.TEXT),
    "floats": to_arrow_lists(cells, DType.FLOATS),
}
part, _ = GrowingPart().grown(pa.table(columns))
part.grown(pa.table(columns))
assert part.num_bytes and "pandas" not in sys.modules
from importlib.util import find_spec
assert find_spec("pandas"), "it is there"
"""
    subprocess.run([sys.executable, "-c", work], check=True)
