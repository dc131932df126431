"""Codes: what they keep, what they weigh, and what is refused as a codec."""

import numpy as np
import pytest
import torch

from palsgd.codecs import BLOCK, Bf16, Codec, Int8, TopK, find_codec
from support.exchanges import CODECS, Sign, codec_of


def by_hand(name, x):
    """What decoding gives back, in NumPy."""
    blocks = x.reshape(-1, BLOCK).astype(np.float64)
    if name == "bf16":
        return torch.tensor(x).bfloat16().double().numpy()
    if name == "int8":
        scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
        return (np.round(blocks / scale) * scale).ravel()
    if name == "int4":
        parts = x.reshape(-1, 64).astype(np.float64)
        scale = np.abs(parts).max(axis=1, keepdims=True) / 7
        scale = torch.tensor(scale).bfloat16().double().numpy()
        return (np.clip(np.round(parts / scale), -7, 7) * scale).ravel()
    if name == "sign":
        return (np.where(blocks < 0, -1, 1) * np.abs(blocks).mean(axis=1, keepdims=True)).ravel()
    kept = np.zeros_like(blocks)
    for row, out in zip(blocks, kept, strict=True):
        places = np.argsort(-np.abs(row))[: round(0.05 * BLOCK)]
        out[places] = torch.tensor(row[places]).float().bfloat16().double().numpy()
    return kept.ravel()


@pytest.mark.parametrize("name", CODECS)
def test_a_code_is_what_its_description_says(name):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=6 * BLOCK) * np.exp(3 * rng.normal(size=6 * BLOCK))).astype(np.float32)
    codec = codec_of(name)
    codes = codec.encode(torch.tensor(x).view(-1, BLOCK))
    assert codes.dtype == torch.uint8
    assert codes.shape == (6, codec.width)
    np.testing.assert_allclose(codec.decode(codes).view(-1), by_hand(name, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bf16", 16), ("int8", 8.125), ("int4", 4.25), ("topk:0.03125", 0.75), ("sign", 1.125)],
)
def test_a_code_has_the_bits_per_number_that_are_claimed(name, bits):
    codec = codec_of(name)
    assert codec.width * 8 / BLOCK == bits
    assert codec.ratio == bits / 32


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk:0.05"])
@pytest.mark.parametrize("fill", [0.0, 1e-38, 1e-44, -3e38, 1.0])
def test_extreme_values_survive(name, fill):
    codec = find_codec(name)
    got = codec.decode(codec.encode(torch.full((2, BLOCK), fill)))
    assert got.isfinite().all()
    if not codec.gathered and abs(fill) >= 1e-29:
        torch.testing.assert_close(got, torch.full((2, BLOCK), fill), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk:0.05"])
def test_a_codec_is_found_by_the_name_it_has(name):
    assert find_codec(name).name == name


def test_top_k_without_a_share_sends_one_value_in_32():
    assert find_codec("topk").kept == find_codec("topk:").kept == BLOCK // 32


def test_none_stands_for_plain_floats():
    assert find_codec(None) is None
    assert find_codec("none") is None


@pytest.mark.parametrize("name", ["int7", "", "topk:0", "topk:2", "topk:x", "topk:nan", 8, 0.5])
def test_an_unknown_name_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match=r"is unknown; use None, 'bf16'.*topk:SHARE.*instance"):
        find_codec(name)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"share=1\.5.*at most 1"):
        TopK(1.5)


def test_a_codec_of_ones_own_is_taken_as_it_is_and_has_its_class_name():
    codec = Sign()
    assert find_codec(codec) is codec
    assert codec.name == "sign"


def test_a_class_in_place_of_an_instance_is_refused():
    with pytest.raises(ValueError, match=r"compress=Sign is a class; .*compress=Sign\(\)"):
        find_codec(Sign)


class Words(Bf16):
    def encode(self, blocks):
        return blocks.bfloat16().view(torch.int16)


class Half(Int8):
    def decode(self, codes):
        return super().decode(codes).half()


class Short(Int8):
    def decode(self, codes):
        return super().decode(codes)[:, :-1]


class Flat(Int8):
    def encode(self, blocks):
        return super().encode(blocks).view(-1)


class Claims(Int8):
    width = BLOCK


class Nothing(Int8):
    def encode(self, blocks):
        return None


class View(Int8):
    width = 4 * BLOCK

    def encode(self, blocks):
        return blocks.view(torch.uint8)


class Spoils(Int8):
    def encode(self, blocks):
        return super().encode(blocks.mul_(2))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Words, r"Words.encode returns \(3, 256\) of torch.int16 .* must return \(3, 512\)"),
        (Half, r"Half.decode returns \(3, 256\) of torch.float16 .* \(3, 256\) of torch.float32"),
        (Short, r"Short.decode returns \(3, 255\)"),
        (Flat, r"Flat.encode returns \(780,\)"),
        (Claims, r"Claims.encode returns \(3, 260\) .* must return \(3, 256\)"),
        (Nothing, r"Nothing.encode returns a NoneType"),
        (View, r"View.encode returns a view of the blocks"),
        (Spoils, r"Spoils.encode changes the blocks"),
    ],
)
def test_a_codec_that_breaks_the_contract_is_refused_with_what_it_returns(kind, line):
    with pytest.raises(ValueError, match=line):
        find_codec(kind())


def test_a_codec_without_decode_cannot_be_made():
    class Blind(Codec):
        def encode(self, blocks):
            return blocks.view(torch.uint8)

    with pytest.raises(TypeError, match="decode"):
        Blind()
