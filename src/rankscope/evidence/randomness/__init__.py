"""Which random generators move, and from which states."""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

_NAMES = ("Python", "numpy", "torch", "accelerator")
_MOVED = (*_NAMES, *(f"{name} between passes" for name in _NAMES))

# fmt: off
COLUMNS = (
    *declare(
        Table.WORKERS,
        ("rng_used", DType.INT, "", Source.LOCAL, Tail.NONE, "random generators that moved in the forward pass: a sum of 1 Python, 2 numpy, 4 torch on the CPU, 8 the accelerator's; of those that moved since the passes of the step before, 16 times as much", None, _MOVED),
        ("rng_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the states of torch's generators before the first forward pass, of those that moved; null when none did"),
        ("rng_digest_python", DType.INT, "", Source.LOCAL, Tail.NONE, "the same of Python's generator"),
        ("rng_digest_numpy", DType.INT, "", Source.LOCAL, Tail.NONE, "the same of numpy's global generator"),
        ("rng_private", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the states of generators that modules and the data set hold for themselves, of those that moved since the step before; null when none did"),
        ("loader_rng_python", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the states in which this rank's data-loader workers found Python's generator; null unless they use it"),
        ("loader_rng_numpy", DType.INT, "", Source.LOCAL, Tail.NONE, "the same of numpy's global generator"),
        ("loader_rng_torch", DType.INT, "", Source.LOCAL, Tail.NONE, "the same of torch's generator on the CPU"),
        ("loader_rng_repeats", DType.INT, "", Source.LOCAL, Tail.NONE, "generators that start in equal states in two or more data-loader workers of this rank: a sum of 1 Python, 2 numpy, 4 torch; null unless they use any", None, _NAMES[:3]),
    ),
)
# fmt: on

KEY = "random"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

PYTHON = 1
NUMPY = 2
TORCH = 4
ACCELERATOR = 8
"""The generators, as bits of the column ``rng_used``."""

GENERATORS = {
    PYTHON: "Python's",
    NUMPY: "numpy's",
    TORCH: "torch's on the CPU",
    ACCELERATOR: "the accelerator's",
}
"""Their names in findings."""

DIGESTS = {
    "rng_digest": TORCH | ACCELERATOR,
    "rng_digest_python": PYTHON,
    "rng_digest_numpy": NUMPY,
}
"""Whose states a column digests."""

BETWEEN_BITS = 4
"""How far they are shifted there, of those that moved between the passes of two steps."""

EVIDENCE = Evidence("randomness", __name__, COLUMNS)
