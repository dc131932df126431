"""Codes that hold the largest values of a block and their places."""

from typing import Self

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK, Codec, to_bytes, to_numbers

_SHARE = 1 / 32  # of the values that "topk" without a share sends


class TopK(Codec):
    """The largest values of each block, by place (one byte) and value (bf16).

    The values are coded once and gathered, and the residue decays. A value is sent about once in
    1/share rounds. In each round between, a similar displacement is added to the residue again.
    With two coded steps a value would wait twice, and without decay the sum that is sent at last
    would move the model much too far: runs diverge.
    """

    gathered = True
    decay = 0.95

    def __init__(self, share: float = _SHARE):
        if not 0 < share <= 1:
            raise ValueError(
                f"TopK has share={share!r}; give the share of the values to send, above 0 and at "
                "most 1"
            )
        self.kept = max(1, round(share * BLOCK))
        self.name, self.width = f"topk:{share:g}", 3 * self.kept

    @classmethod
    def parse(cls, text: str) -> Self | None:
        kind, _, share = text.partition(":")
        if kind != "topk":
            return None
        try:
            return cls(float(share or _SHARE))
        except ValueError:  # no number, or no share; the error of find_codec lists the codecs
            return None

    def encode(self, blocks: Tensor) -> Tensor:
        places = blocks.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks.gather(1, places).bfloat16()
        return torch.cat([places.to(torch.uint8), to_bytes(values)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        places, values = codes.split([self.kept, 2 * self.kept], dim=1)
        numbers = to_numbers(values, torch.bfloat16).float()
        return numbers.new_zeros(len(codes), BLOCK).scatter_(1, places.long(), numbers)
