"""Codes that are integers, sent with the scale by which they are multiplied."""

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK, Codec, to_bytes, to_numbers

_PART = 64  # values of an int4 block that share a scale


class Int8(Codec):
    """Integers -127..127, with one scale per block."""

    width = BLOCK + 4

    def encode(self, blocks: Tensor) -> Tensor:
        scale = _scale(blocks, 127)
        levels = (blocks / scale).round_().to(torch.int8)
        return torch.cat([to_bytes(levels), to_bytes(scale)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        levels, scale = codes.split([BLOCK, 4], dim=1)
        return to_numbers(levels, torch.int8) * to_numbers(scale, torch.float32)


class Int4(Codec):
    """Integers -7..7, two in a byte, with one scale per 64 values."""

    width = BLOCK // 2 + 2 * (BLOCK // _PART)

    def encode(self, blocks: Tensor) -> Tensor:
        parts = blocks.reshape(-1, _PART)
        scale = _scale(parts, 7).bfloat16()  # bf16 rounds the scale, so a quotient may be 7.03
        levels = (parts / scale).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        pairs = levels.view(len(blocks), BLOCK // 2, 2)
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        return torch.cat([packed, to_bytes(scale.view(len(blocks), -1))], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        packed, scale = codes.split([BLOCK // 2, self.width - BLOCK // 2], dim=1)
        levels = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, _PART).float().sub_(8)
        return levels.mul_(to_numbers(scale, torch.bfloat16).view(-1, 1)).view(-1, BLOCK)


def _scale(blocks: Tensor, levels: int) -> Tensor:
    """The scale of each row. It is never zero, nor so small that a division by it overflows."""
    return blocks.abs().amax(dim=1, keepdim=True).div_(levels).clamp_(min=1e-30)
