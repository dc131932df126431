"""The contract of a codec: it turns blocks of 256 numbers into bytes and back."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

BLOCK = 256  # values that are coded together


class Codec(ABC):
    """A user's codec defines `encode` and `decode`; everything else has a default.

    What a code loses is kept as a residue and added to the next message. A codec that loses much of
    each value (top-k, signs) makes runs diverge unless it is `gathered` and its residue decays. As
    long as a loss is not sent, the model does not move by it, so every round makes a similar
    displacement and adds it to the residue again. Then all of the residue is sent at once.

    Attributes:
        name: what settings and states call it; by default the class's name in lower case.
        gathered: False: the mean is computed in two coded steps. True: a message is coded once, and
            every worker receives the codes of all workers.
        decay: the factor on the residue before it is added to the next message.

    Example:
        >>> import torch, palsgd
        >>> class Half(palsgd.Codec):
        ...     def encode(self, blocks):
        ...         return blocks.clamp(-65504, 65504).half().view(torch.uint8)
        ...     def decode(self, codes):
        ...         return codes.clone().view(torch.half).float()
        >>> Half().name, Half().width, Half().ratio
        ('half', 512, 0.5)
    """

    name: str  # default: the class's name in lower case
    gathered: ClassVar[bool] = False  # True: coded once, and every worker gets every worker's codes
    decay: float = 1.0  # factor on the residue before it is added to the next message

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    @abstractmethod
    def encode(self, blocks: Tensor) -> Tensor:
        """(n, 256) float32 -> (n, width) uint8, on the same device and in new memory; `blocks` are
        not changed."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """(n, width) uint8 -> (n, 256) float32. The same codes must give the same bits."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The codec that `text` names, or None if `text` names no codec of this class."""
        return cls() if text == cls.name else None

    @cached_property
    def width(self) -> int:
        """The bytes of the code of one block."""
        return self.encode(torch.zeros(1, BLOCK)).shape[-1]

    @property
    def ratio(self) -> float:
        """The bytes of a code as a share of those of the 32-bit floats it stands for."""
        return self.width / (4 * BLOCK)


def check_codec(codec: Codec) -> None:
    """Raise unless encode and decode meet the contract on three blocks."""
    blocks = torch.linspace(-1.0, 1.0, 3 * BLOCK).view(3, BLOCK)
    given = blocks.clone()
    codes = codec.encode(given)
    if not torch.equal(given, blocks):
        raise ValueError(
            f"{_kind(codec)}.encode changes the blocks it is given; compute on a copy, as what the "
            "code loses is found by comparison with them"
        )
    _check_tensor(codec, "encode", codes, (3, codec.width), torch.uint8)
    if codes.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
        raise ValueError(
            f"{_kind(codec)}.encode returns a view of the blocks it is given; return a copy "
            "(.clone()), as those change while the codes travel"
        )
    _check_tensor(codec, "decode", codec.decode(codes), (3, BLOCK), torch.float32)


def _check_tensor(
    codec: Codec, method: str, got: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if isinstance(got, Tensor) and tuple(got.shape) == shape and got.dtype == dtype:
        return
    found = f"a {type(got).__name__}"
    if isinstance(got, Tensor):
        found = f"{tuple(got.shape)} of {got.dtype}"
    given = f"three blocks of {BLOCK} float32 values" if method == "encode" else "their codes"
    raise ValueError(
        f"{_kind(codec)}.{method} returns {found} for {given}; it must return {shape} of {dtype}"
    )


def _kind(codec: Codec) -> str:
    return type(codec).__name__


def to_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def to_numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_bytes`. It copies, as codes may begin at an address where such a number
    may not."""
    return torch.empty(codes.shape, dtype=torch.uint8, device=codes.device).copy_(codes).view(dtype)
