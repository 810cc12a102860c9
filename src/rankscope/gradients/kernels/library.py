"""The compiled library of the kernels: one file for each level of vector instructions.

``build.py`` compiles it when the package is built. Without it, plain torch does its work.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankscope.gradients.kernels.build import FOLDER, hash_sources

_LEVEL_OF = {"AVX512": "avx512", "AVX2": "avx2"}
"""The library by torch's name for the processor's level; elsewhere ``default``."""

_FUNCTIONS = {
    "measure_many": ("", "pqpqppppp"),
    "hand_over": ("", "ppppp"),
    "digest": ("Q", "pqqp"),
    "digests": ("", "pqp"),
    "dot": ("d", "ippq"),
    "samples": ("", "ppiqqpqqp"),
    "labels": ("q", "pqqqq"),
    "deposit": ("", "ipqpip"),
    "convert": ("", "pqqqdip"),
}
"""Kinds of the result and of the arguments, by the function's name without ``rankscope_``."""

_KINDS: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "d": ctypes.c_double,
    "": None,
}

_log = logging.getLogger("rankscope")


class NoLibraryError(Exception):
    """The compiled functions cannot be used; the message has the reason, and the remedy."""


class StaleLibraryError(NoLibraryError):
    """The library was compiled from other sources than those beside it."""


def compiled(name: str, *, holding_lock: bool = False) -> Callable[..., Any]:
    """Return a compiled function; see the sources in C for its arguments.

    Args:
        name: A key of ``_FUNCTIONS``.
        holding_lock: Whether it keeps the interpreter's lock, for short work.

    Raises:
        NoLibraryError: There is no library for it, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    if os.environ.get("RANKSCOPE_NATIVE") == "0":
        raise NoLibraryError("RANKSCOPE_NATIVE=0")
    library = load_once()
    if isinstance(library, NoLibraryError):
        raise type(library)(str(library)) from library
    returns, takes = _FUNCTIONS[name]
    kinds = [_KINDS[kind] for kind in takes]
    if holding_lock:
        return ctypes.PYFUNCTYPE(_KINDS[returns], *kinds)((f"rankscope_{name}", library))
    function: Any = getattr(library, f"rankscope_{name}")
    function.argtypes = kinds
    function.restype = _KINDS[returns]
    loaded: Callable[..., Any] = function
    return loaded


@functools.cache
def load_once() -> ctypes.CDLL | NoLibraryError:
    """Return the library, or why there is none, which is logged once per process."""
    try:
        return load(library_path())
    except NoLibraryError as error:
        level = logging.WARNING if isinstance(error, StaleLibraryError) else logging.INFO
        _log.log(level, "plain torch does the work of compiled kernels, slower: %s", error)
        return error


def library_path() -> Path:
    """Return where the library for this processor is, if there is one."""
    level = _LEVEL_OF.get(torch.backends.cpu.get_cpu_capability(), "default")
    return FOLDER / f"kernels-{level}.so"


def load(path: Path) -> ctypes.CDLL:
    """Return a library.

    Raises:
        StaleLibraryError: It was compiled from other sources than those beside it.
        NoLibraryError: It is missing, or cannot be loaded.
    """
    expected = hash_sources()
    helps = "with a C compiler, install rankscope anew"
    if expected is not None:
        helps = f"run `python {FOLDER / 'build.py'}`"
    if not path.exists():
        raise NoLibraryError(f"{path} is missing; {helps}")
    try:
        library = ctypes.CDLL(str(path))
        found = ctypes.c_char_p.in_dll(library, "rankscope_sources").value
    except (OSError, ValueError) as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
    if expected is not None and found != expected.encode():
        raise StaleLibraryError(
            f"{path} was compiled from other sources than those beside it; {helps}"
        )
    return library
