"""Codes that are shorter floating-point numbers."""

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK, Codec, to_bytes, to_numbers


class Bf16(Codec):
    """The upper half of a 32-bit float, rounded."""

    width = 2 * BLOCK

    def encode(self, blocks: Tensor) -> Tensor:
        return to_bytes(blocks.bfloat16())

    def decode(self, codes: Tensor) -> Tensor:
        return to_numbers(codes, torch.bfloat16).float()
