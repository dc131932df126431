"""Codecs: the codes that are sent instead of 32-bit floats, and the mean of coded messages."""

from palsgd.codecs.codec import BLOCK, Codec
from palsgd.codecs.coded_mean import CodedMean, GatheredMean, Residue, message_bytes
from palsgd.codecs.floating import Bf16
from palsgd.codecs.integer import Int4, Int8
from palsgd.codecs.registry import find_codec
from palsgd.codecs.topk import TopK

__all__ = [
    "BLOCK",
    "Bf16",
    "Codec",
    "CodedMean",
    "GatheredMean",
    "Int4",
    "Int8",
    "Residue",
    "TopK",
    "find_codec",
    "message_bytes",
]
