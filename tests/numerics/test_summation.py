"""Sums in every order and type, against loops over single numbers, torch, and exact sums."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.lab.numerics.summation import (
    TYPES,
    Arithmetic,
    Scheme,
    num_buckets,
    reduce_buffers,
    to_buffers,
    worst_factor,
    worst_underflow,
)

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARITHMETICS = [
    Arithmetic(inputs, sums) for inputs in TYPES for sums in dict.fromkeys(("float32", inputs))
]
BUCKET = 5


def gradients(num_workers, num_elements, seed, spread=3.0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_workers, num_elements))
    return (values * 10.0 ** rng.uniform(-spread, 0, values.shape)).astype(np.float32)


def reduce_mean(values_WN, scheme=Scheme.SEQUENTIAL, arithmetic=None, order=None):
    arithmetic = arithmetic or Arithmetic()
    return reduce_buffers(to_buffers(values_WN, arithmetic), scheme, arithmetic, order)


def exact_sums(values_WN):
    """Return the correctly rounded sums over workers ``[N]``."""
    return np.array([math.fsum(column) for column in values_WN.T.astype(np.float64).tolist()])


def order_of(scheme, num_workers, num_elements, rng):
    if scheme is Scheme.ARRIVAL:
        count = num_buckets(num_elements, BUCKET)
        return np.stack([rng.permutation(num_workers) for _ in range(count)])
    return rng.permutation(num_workers)


def in_words_of_torch(values_WN, scheme, arithmetic, order):
    """Add up element by element with torch's own scalars of each type."""
    num_workers, num_elements = values_WN.shape
    inputs, sums = TORCH[arithmetic.inputs], TORCH[arithmetic.sums]
    buffers = (torch.from_numpy(values_WN).to(inputs) / num_workers).to(sums)
    means = []
    for element in range(num_elements):
        own = order
        if scheme is Scheme.ARRIVAL:
            own = order[element // BUCKET]
        if scheme is Scheme.RING:
            first = element * num_workers // num_elements
            own = [*order[first:], *order[:first]]
        terms = [buffers[worker, element] for worker in own]
        total = ADDED[scheme](terms)
        assert total.dtype is sums
        means.append(float(total.to(inputs)))
    return np.array(means, dtype=np.float32)


def chain(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def tree(terms):
    if len(terms) == 1:
        return terms[0]
    width = 1 << ((len(terms) - 1).bit_length() - 1)
    return tree(terms[:width]) + tree(terms[width:])


def halving(terms):
    if len(terms) == 1:
        return terms[0]
    width = 1 << (len(terms).bit_length() - 1)
    if width < len(terms):
        first = [a + b for a, b in zip(terms, terms[width:], strict=False)]
        return halving([*first, *terms[len(first) : width]])
    half = width // 2
    return halving([a + b for a, b in zip(terms[:half], terms[half:], strict=True)])


ADDED = {**dict.fromkeys(Scheme, chain), Scheme.TREE: tree, Scheme.HALVING: halving}


def same_bits(first, second):
    return np.array_equal(first.view(np.int32), second.view(np.int32))


@pytest.mark.parametrize("scheme", Scheme)
@settings(max_examples=15, deadline=None)
@given(
    num_workers=st.integers(2, 11),
    num_elements=st.integers(1, 23),
    arithmetic=st.sampled_from(ARITHMETICS),
    seed=st.integers(0, 2**32 - 1),
)
def test_bits_equal_those_of_a_loop_over_torchs_numbers(
    scheme, num_workers, num_elements, arithmetic, seed
):
    values = gradients(num_workers, num_elements, seed)
    order = order_of(scheme, num_workers, num_elements, np.random.default_rng(seed))
    got = reduce_buffers(
        to_buffers(values, arithmetic), scheme, arithmetic, order, bucket_elements=BUCKET
    )
    assert same_bits(got, in_words_of_torch(values, scheme, arithmetic, order))


@pytest.mark.parametrize("scheme", Scheme)
@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(2, 64),
    arithmetic=st.sampled_from(ARITHMETICS),
    spread=st.floats(0, 8),
    cancels=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_error_is_larger_than_the_bound(scheme, num_workers, arithmetic, spread, cancels, seed):
    values = gradients(num_workers, 40, seed, spread)
    if cancels:
        values -= values.mean(axis=0)
    order = order_of(scheme, num_workers, 40, np.random.default_rng(seed))
    got = reduce_buffers(
        to_buffers(values, arithmetic), scheme, arithmetic, order, bucket_elements=BUCKET
    )
    exact = exact_sums(values) / num_workers
    sizes = np.abs(values).mean(axis=0, dtype=np.float64)
    bound = worst_factor(num_workers, scheme, arithmetic) * sizes
    bound += worst_underflow(num_workers, arithmetic)
    assert (np.abs(got - exact) <= bound * (1 + 1e-9)).all()
