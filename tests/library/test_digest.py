"""The digest by which workers compare tensors: it sees every bit and every order, and no cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palsgd.digest import BLOCK, COLUMNS, ROWS, Digest, chained, digest, digest_of, folded

MASK = 2**64 - 1


def mixed(number):
    """The steps of splitmix64 in Python's integers, with shifts that keep the sign."""

    def signed(value):
        return (value & MASK) - (2**64 if value & 2**63 else 0)

    z = signed(number * 0x9E3779B97F4A7C15)
    z = signed((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
    z = signed((z ^ (z >> 27)) * 0x94D049BB133111EB)
    return z ^ (z >> 31)


def slow_digest(flat):
    """The sum of words times weights, as the module's first lines say it, with a loop per word."""
    data = flat.numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<i8").tolist()
    total = 0
    for place, word in enumerate(words):
        block, (row, column) = place // BLOCK, divmod(place % BLOCK, COLUMNS)
        weight = (mixed(column + 1) | 1) + (mixed(COLUMNS + row + 1) & ~1)
        total += word * weight * (mixed(block - 2**40) | 1)
    total &= MASK
    return (total ^ (total >> 32)) & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 2 * COLUMNS, 5001, 2 * BLOCK + 2 * COLUMNS + 3])
def test_the_digest_is_the_weighted_sum_of_words(size, dtype):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    twin = flat.view(torch.int16) if dtype == torch.bfloat16 else flat
    assert digest(flat) == slow_digest(twin)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=3), st.integers(0, 2 * BLOCK))
def test_the_digest_does_not_depend_on_how_the_tensor_is_cut(blocks, rest):
    sizes = [2 * BLOCK * count for count in blocks] + [rest]
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rest))
    found = Digest()
    for piece in flat.split(sizes):
        found.add(piece)
    assert folded(int(found.total())) == digest(flat)


@pytest.mark.parametrize("shape", [(1000, 2), (8, 2 * COLUMNS), (3 * ROWS, 2 * COLUMNS), (9, 4)])
def test_rows_in_another_order_have_another_digest(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape)
    seen = {digest(matrix.view(-1))}
    for _ in range(20):
        seen.add(digest(matrix[torch.randperm(shape[0])].view(-1)))
    for first in range(3):  # the smallest changes: two neighbours
        order = torch.arange(shape[0])
        order[[first, first + 1]] = order[[first + 1, first]]
        seen.add(digest(matrix[order].view(-1)))
    assert len(seen) == 24


def test_blocks_in_another_order_have_another_digest():
    blocks = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    orders = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0]]
    assert len({digest(blocks[order].view(-1)) for order in orders}) == 4


def test_a_digest_of_zeros_is_zero():
    assert digest(torch.zeros(5000)) == digest_of([torch.zeros(3), torch.zeros(7)]) == 0
    assert digest_of([]) == chained([]) == chained([0, 0]) == 0


def test_tensors_in_another_order_have_another_digest():
    a, b = torch.arange(4.0) + 1, torch.arange(6.0) + 1
    assert digest_of([a, b]) != digest_of([b, a])
    assert chained([1, 2]) != chained([2, 1])


def test_a_tensor_that_begins_within_a_word_has_the_digest_of_its_copy():
    flat = torch.arange(100.0)
    assert digest(flat[1:]) == digest(flat[1:].clone())
