import json
import os
import subprocess
import sys

import pytest

from support.kernel_checks import needs_triton

pytestmark = needs_triton


COMPILE = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rankscope.gradients.kernels import triton as reading, triton_digest

pointers = dict(segments="i64", jobs="i64", addresses="i64", row_signs="fp32", period="i8",
                sketches="fp32", norms="fp64", tops="fp32", nonfinites="i64", jobs_of="i64",
                sketch="fp32", squared_norm="fp64", largest="fp32", nonfinite="i64")
grid = dict(WIDTH=4093, TILES=4, TILE=1024)
kinds = {
    "measure_tiles": dict(ROWS=4, STRIDE=12304, SKETCH=True, TYPE=tl.bfloat16, SIZE=2, **grid),
    "combine": dict(ROWS=16, SKETCH=True, FRESH=False, WHOLE=0, **grid),
    "gather": dict(WIDE=4093, REDUCED=True),
    "digest_chunks": dict(SQUARES=True),
    "digest_rows": dict(MASKED=True),
}
modules = {"measure_tiles": reading, "combine": reading, "gather": reading,
           "digest_chunks": triton_digest, "digest_rows": triton_digest}
pointers |= dict(table="i64", local="fp32", reduced="fp32", signs="fp32", squares="fp64",
                 reduced_squares="fp64", numbers="fp64")
integers = ("num_sketches", "num_rows", "largest_at", "length", "row", "step", "rows", "first")


def compile(name):
    constants = kinds[name]
    kernel, pointed = getattr(modules[name], name), dict(pointers)
    if name == "digest_rows":
        pointed = dict(words="i64", mask="i8", weights="i64", digests="i64")
    if name == "digest_chunks":
        pointed = {n: "i64" for n in kernel.arg_names if n not in (*integers, "SQUARES")}
        pointed |= dict(squares="fp64")
    signature = {n: "*" + pointed[n] if n in pointed else "constexpr" for n in kernel.arg_names}
    signature |= {n: "i32" for n in integers if n in signature}
    if name == "digest_rows":
        signature |= {n: "i32" for n in ("row_step", "word_step", "mask_step", "places")}
        signature |= {"mix": "i64"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n in pointed}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    options = dict(num_warps=4, enable_fp_fusion=True)
    return triton.compile(source, target=target, options=options).asm["ptx"]


print(json.dumps({name: compile(name) for name in kinds}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile all in one process, for the compiler takes seconds to import; it needs no GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_it_compiles_to_aligned_vector_loads(compiled):
    """Four neighbouring elements in bfloat16 must be one load."""
    lines = compiled["measure_tiles"].splitlines()
    assert sum(".v2.b32" in line and "evict_first" in line for line in lines) == 8


def test_all_kernels_compile(compiled):
    assert len(compiled) == 5
    assert all(name in code for name, code in compiled.items())
