"""Equality of reports, field by field and bit by bit."""

import dataclasses
from collections.abc import Mapping

import numpy as np


def assert_same(read, original, where="report"):
    """Assert that two values are equal in kind, type and bits; NaN equals NaN."""
    assert type(read) is type(original) or isinstance(read, Mapping), where
    if dataclasses.is_dataclass(original):
        for field in dataclasses.fields(original):
            values = getattr(read, field.name), getattr(original, field.name)
            assert_same(*values, f"{where}.{field.name}")
    elif isinstance(original, Mapping):
        assert list(read) == list(original), where
        for name in original:
            assert_same(read[name], original[name], f"{where}[{name}]")
    elif isinstance(original, tuple):
        assert len(read) == len(original), where
        for index, pair in enumerate(zip(read, original, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(original, np.ndarray):
        assert (read.dtype, read.shape) == (original.dtype, original.shape), where
        np.testing.assert_array_equal(read, original, where)
        if original.dtype.kind == "f":
            known = ~np.isnan(original)
            assert (np.signbit(read) == np.signbit(original))[known].all(), where
    elif isinstance(original, float):
        assert read == original or (np.isnan(read) and np.isnan(original)), where
    else:
        assert read == original, where
