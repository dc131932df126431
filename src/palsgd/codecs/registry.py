"""The codecs by name."""

from palsgd.checks import in_error
from palsgd.codecs.codec import Codec, check_codec
from palsgd.codecs.floating import Bf16
from palsgd.codecs.integer import Int4, Int8
from palsgd.codecs.topk import TopK

_KINDS: tuple[type[Codec], ...] = (Bf16, Int8, Int4, TopK)


def find_codec(compress: str | Codec | None) -> Codec | None:
    """The codec of that name, or the instance given; None, or "none", for plain floats."""
    if compress is None or (isinstance(compress, str) and compress == "none"):
        return None
    if isinstance(compress, Codec):
        check_codec(compress)
        return compress
    if isinstance(compress, type) and issubclass(compress, Codec):
        raise ValueError(
            f"compress={compress.__name__} is a class; give an instance of it, such as "
            f"compress={compress.__name__}()"
        )
    found = (kind.parse(compress) for kind in _KINDS if isinstance(compress, str))
    codec = next((codec for codec in found if codec is not None), None)
    if codec is None:
        raise ValueError(
            f"compress={in_error(compress)} is unknown; use None, 'bf16', 'int8', 'int4', "
            "'topk:SHARE' with the share of the elements to send, e.g. 'topk:0.03', or an instance "
            "of a subclass of palsgd.codecs.Codec"
        )
    return codec
