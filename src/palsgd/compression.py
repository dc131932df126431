"""What travels instead of 32-bit floats, and the mean of messages that travel so.

A codec turns blocks of 256 numbers into bytes and back. The mean of coded messages is made in two
steps, as in a ring all-reduce: every worker sends each other worker that one's chunk, coded; each
takes the mean of the chunks it got, in full precision, and sends that, coded again, to all. So
nothing but codes travels, and all decode the same bytes. What a code loses is kept (`Residue`) and
added to the next message: error feedback, on both steps.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256  # elements that are coded together
_PART = 64  # of an int4 block that share a scale


class Codec(Protocol):
    name: str
    width: int  # bytes of a block

    def encode(self, blocks: Tensor) -> Tensor:
        """(n, 256) float32 -> (n, width) uint8."""
        ...

    def decode(self, codes: Tensor) -> Tensor: ...


class Bf16:
    name, width = "bf16", 2 * BLOCK

    def encode(self, blocks: Tensor) -> Tensor:
        return _bytes(blocks.bfloat16())

    def decode(self, codes: Tensor) -> Tensor:
        return _numbers(codes, torch.bfloat16).float()


class Int8:
    """Levels -127..127 of a scale per block."""

    name, width = "int8", BLOCK + 4

    def encode(self, blocks: Tensor) -> Tensor:
        scale = _scale(blocks, 127)
        levels = (blocks / scale).round_().to(torch.int8)
        return torch.cat([_bytes(levels), _bytes(scale)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        levels, scale = codes.split([BLOCK, 4], dim=1)
        return _numbers(levels, torch.int8) * _numbers(scale, torch.float32)


class Int4:
    """Levels -7..7, two in a byte, of a scale per 64 elements."""

    name, width = "int4", BLOCK // 2 + 2 * (BLOCK // _PART)

    def encode(self, blocks: Tensor) -> Tensor:
        parts = blocks.reshape(-1, _PART)
        scale = _scale(parts, 7).bfloat16()  # rounded, so a level may come out as 7.03
        levels = (parts / scale).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        pairs = levels.view(len(blocks), BLOCK // 2, 2)
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        return torch.cat([packed, _bytes(scale.view(len(blocks), -1))], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        packed, scale = codes.split([BLOCK // 2, self.width - BLOCK // 2], dim=1)
        levels = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, _PART).float().sub_(8)
        return levels.mul_(_numbers(scale, torch.bfloat16).view(-1, 1)).view(-1, BLOCK)


class TopK:
    """The largest elements of each block, by place (one byte) and value (bf16)."""

    def __init__(self, share: float):
        self.kept = max(1, round(share * BLOCK))
        self.name, self.width = f"topk:{share:g}", 3 * self.kept

    def encode(self, blocks: Tensor) -> Tensor:
        places = blocks.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks.gather(1, places).bfloat16()
        return torch.cat([places.to(torch.uint8), _bytes(values)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        places, values = codes.split([self.kept, 2 * self.kept], dim=1)
        values = _numbers(values, torch.bfloat16).float()
        return values.new_zeros(len(codes), BLOCK).scatter_(1, places.long(), values)


def find_codec(name: str | None) -> Codec | None:
    """The codec of that name; None, or "none", for plain floats."""
    if name is None or name == "none":
        return None
    plain: list[Codec] = [Bf16(), Int8(), Int4()]
    for codec in plain:
        if codec.name == name:
            return codec
    kind, _, share = str(name).partition(":")
    if kind == "topk":
        try:
            kept = float(share or 1 / 32)
        except ValueError:
            kept = math.nan
        if 0 < kept <= 1:
            return TopK(kept)
    raise ValueError(
        f"compress={name!r} is unknown; use None, 'bf16', 'int8', 'int4', or 'topk:SHARE' with the "
        "share of the elements to send, e.g. 'topk:0.03'"
    )


@dataclass
class Residue:
    """What earlier messages left unsent: of this worker's own, and of the means it made."""

    own: Tensor
    mean: Tensor


class CodedMean:
    """The mean of one worker's `values` with those of the others; the last `exact` of them
    travel as they are."""

    def __init__(
        self, values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
    ):
        self._codec, self._workers = codec, workers
        self._payload, self._tail = values[: len(values) - exact], values[len(values) - exact :]
        self._rows = max(1, math.ceil(len(self._payload) / (workers * BLOCK)))  # blocks in a chunk
        self._tail_width = math.ceil(exact / workers) * values.itemsize
        self._residue = residue
        self.left = Residue(values[:0], values[:0])  # what this exchange leaves, when it is through

    @property
    def nbytes(self) -> int:
        """Of what a worker sends: a chunk for each worker."""
        return self._workers * (self._rows * self._codec.width + self._tail_width)

    def chunks(self) -> Tensor:
        """What to send: one row of bytes for each worker."""
        size = self._workers * self._rows * BLOCK
        whole = self._payload.new_zeros(size, dtype=torch.float32)
        whole[: len(self._payload)] = self._payload
        if self._residue is not None:
            whole += self._residue.own
        codes = self._codec.encode(whole.view(-1, BLOCK))
        self.left.own = whole.sub_(self._codec.decode(codes).view(-1))
        tail = self._tail.new_zeros(self._workers * self._tail_width // self._tail.itemsize)
        tail[: len(self._tail)] = self._tail
        return torch.cat([codes.view(self._workers, -1), _bytes(tail.view(self._workers, -1))], 1)

    def mean(self, received: Tensor) -> Tensor:
        """The mean of one chunk, coded, from the rows that the workers sent of it."""
        total, tail = self._decoded(received[0])
        for row in received[1:]:  # in the order of the workers, so that any engine gets these bits
            more, more_tail = self._decoded(row)
            total += more
            tail += more_tail
        whole = total.div_(self._workers)
        if self._residue is not None:
            whole += self._residue.mean
        codes = self._codec.encode(whole.view(-1, BLOCK))
        self.left.mean = whole.sub_(self._codec.decode(codes).view(-1))
        return torch.cat([codes.view(-1), _bytes(tail.div_(self._workers))])

    def accept(self, means: Tensor) -> None:
        """Put the mean, from its rows in the order of the workers that made them, into place."""
        parts = [self._decoded(row) for row in means]
        self._payload.copy_(torch.cat([payload for payload, _ in parts])[: len(self._payload)])
        self._tail.copy_(torch.cat([tail for _, tail in parts])[: len(self._tail)])

    def _decoded(self, row: Tensor) -> tuple[Tensor, Tensor]:
        codes, tail = row.split([len(row) - self._tail_width, self._tail_width])
        decoded = self._codec.decode(codes.view(self._rows, self._codec.width)).view(-1)
        return decoded, _numbers(tail, self._tail.dtype)


def _scale(blocks: Tensor, levels: int) -> Tensor:
    """Never zero, and never so small that a quotient by it overflows."""
    return blocks.abs().amax(dim=1, keepdim=True).div_(levels).clamp_(min=1e-30)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_bytes`. A copy, since codes may begin where such a number may not."""
    return torch.empty(codes.shape, dtype=torch.uint8, device=codes.device).copy_(codes).view(dtype)
