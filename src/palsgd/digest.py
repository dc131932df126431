"""32 bits by which workers compare tensors that are too large to be sent.

A tensor is read as 8-byte words, in blocks of ROWS x COLUMNS. The digest is the sum over all words
of word times weight, in 64 bits, folded into 32. The weight of the word in block i, row r and
column c is m_i (a_c + b_r), an odd number, so the digest changes with any bit and with the order of
the words. Summing a block over its rows and over its columns first leaves ROWS + COLUMNS
multiplications for it, and additions are as fast as memory:

    sum_rc (a_c + b_r) x_rc = sum_c a_c (sum_r x_rc) + sum_r b_r (sum_c x_rc)

The weights depend on a word's place only, so the sum does not depend on how the tensor was cut into
pieces, as long as every piece but the last consists of whole blocks.
"""

from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS, COLUMNS = 64, 1024
BLOCK = ROWS * COLUMNS  # words: half a MiB, which stays in a core's cache
_MASK = 0xFFFFFFFF
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MANY = 512  # blocks whose sums are weighed at once; a GPU sums them at once too


def block_of(tensor: Tensor) -> int:
    """The elements of a block."""
    return BLOCK * 8 // tensor.itemsize


class Digest:
    """The digest of a flat tensor that is read piece by piece, from its first element on."""

    def __init__(self) -> None:
        self._weighed = 0  # blocks whose sums have their weights
        self._totals: list[Tensor] = []  # of those blocks
        self._sums: list[tuple[Tensor, Tensor]] = []  # of the blocks after them, by column and row

    def add(self, piece: Tensor) -> None:
        """Read the next piece. Every piece but the last must have whole blocks."""
        words = _words(piece)
        many = 1 if piece.device.type == "cpu" else _MANY  # a block stays in the cache of a core
        for low in range(0, len(words), many * BLOCK):
            part = words[low : low + many * BLOCK]
            whole = len(part) // BLOCK * BLOCK
            if whole:
                self._add(part[:whole].view(-1, ROWS, COLUMNS))
            if whole < len(part):
                rest = part[whole:]
                self._add(pad(rest, (0, -len(rest) % COLUMNS)).view(1, -1, COLUMNS))

    def _add(self, blocks: Tensor) -> None:
        """Add up whole blocks, or the first rows of one."""
        by_row, missing = blocks.sum(2), ROWS - blocks.shape[1]
        self._sums.append((blocks.sum(1), pad(by_row, (0, missing)) if missing else by_row))
        if len(blocks) > 1 or len(self._sums) == _MANY:
            self._weigh()

    def total(self) -> Tensor:
        """The sum so far, 64 bits on the device of the pieces, for `folded`."""
        self._weigh()
        return sum(self._totals, torch.zeros((), dtype=torch.int64))

    def _weigh(self) -> None:
        """Multiply sums by their weights, those of many blocks at once."""
        if not self._sums:
            return
        by_column, by_row = (torch.cat(each) for each in zip(*self._sums, strict=True))
        columns, rows = _weights(by_row.device)
        sums = (by_column * columns).sum(1) + (by_row * rows).sum(1)
        self._totals.append((sums * _odd(self._weighed, len(sums), sums.device)).sum())
        self._weighed += len(sums)
        self._sums = []


def digest(flat: Tensor) -> int:
    """32 bits of a flat tensor."""
    return folded(int(total(flat)))


def total(flat: Tensor) -> Tensor:
    """The sum that `folded` makes the digest of, without waiting for the device."""
    found = Digest()
    found.add(flat)
    return found.total()


def sum_of_words(flat: Tensor) -> Tensor:
    """The plain sum of the words, a quicker digest that does not see their order. The sums of
    pieces add up to that of the whole, if every piece begins at a whole word."""
    return _words(flat).sum()


def digest_of(tensors: Iterable[Tensor]) -> int:
    """32 bits of flat tensors on one device, in their order; 0 if all of them are zero."""
    totals = [total(each) for each in tensors]
    if not totals:
        return 0
    sums = torch.stack(totals)
    return folded(int((sums * _odd(0, len(totals), sums.device)).sum()))


def row_digests(stacked: Iterable[Tensor], rows: int) -> list[int]:
    """32 bits of each row of stacked tensors, which do not see the order of elements; 0 for a row
    of zeros."""
    found: Tensor | None = None
    for number, each in enumerate(stacked):
        parts = (each.reshape(rows, each.numel() // rows) + 0.0).contiguous()  # -0 becomes 0
        sums = parts.view(_WHOLE[parts.itemsize]).sum(1, dtype=torch.int64)
        sums = sums * _odd(number, 1, sums.device)
        found = sums if found is None else found + sums
    return [0] * rows if found is None else [folded(total) for total in found.tolist()]


def chained(numbers: Iterable[int]) -> int:
    """32 bits of several digests, in their order; 0 if all of them are 0."""
    found = 0
    for number in numbers:
        found = found * 0x9E3779B97F4A7C15 + number
    return folded(found)


def folded(number: int) -> int:
    """The lowest 64 bits of a sum, folded into 32 bits."""
    return (number ^ (number >> 32)) & _MASK


def _words(flat: Tensor) -> Tensor:
    """The 8-byte words of a flat tensor. The elements behind the last whole word become one more
    word."""
    size, each = flat.nbytes, flat.itemsize
    if flat.storage_offset() * each % 8:  # a view into a buffer of somebody else's
        flat = flat.clone()
    whole = flat[: size // 8 * 8 // each].view(torch.int64)
    if not size % 8:
        return whole
    rest = flat.new_zeros(8 // each)
    rest[: size % 8 // each] = flat[size // 8 * 8 // each :]
    return torch.cat([whole, rest.view(torch.int64)])


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd weights of columns and even ones of rows, so that all their sums are odd."""
    mixed = _mixed(torch.arange(1, COLUMNS + ROWS + 1, device=device))
    return mixed[:COLUMNS] | 1, mixed[COLUMNS:] & ~1


@lru_cache(maxsize=64)
def _odd(first: int, count: int, device: torch.device) -> Tensor:
    """An odd multiplier for each of the places first, first + 1, ..."""
    return _mixed(torch.arange(first, first + count, device=device) - (1 << 40)) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits that look random (the steps of splitmix64, with signed shifts)."""
    z = numbers * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31)
