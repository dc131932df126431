"""Causal attention of stacked workers beside products of matrices."""

import pytest
import torch
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from palsgd.lab.models.attention import causal_attention

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    ),
]


def by_hand(q, k, v, window):
    """Of [..., tokens, heads, size], in fp64."""
    q, k, v = (x.double().transpose(-3, -2) for x in (q, k, v))
    tokens = q.shape[-2]
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = (back < 0) | (back >= (window or tokens))
    products = (q @ k.transpose(-1, -2)).masked_fill(hidden.to(q.device), float("-inf"))
    return (products.softmax(-1) @ v).transpose(-3, -2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "tokens"), [(0, 40), (7, 40), (7, 33), (64, 40)])
@pytest.mark.parametrize("stacked", [False, True])
def test_attention_is_softmax_over_the_tokens_in_sight(device, dtype, window, tokens, stacked):
    generator = torch.Generator().manual_seed(1)
    shape = (3, 2, tokens, 4, 16) if stacked else (2, tokens, 4, 16)
    q, k, v, weight = (
        torch.randn(shape, generator=generator).to(device, dtype) * 0.3 for _ in range(4)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attention(q, k, v):
        return causal_attention(q, k, v, window if window < tokens else 0)

    kernels = [SDPBackend.MATH, *([SDPBackend.FLASH_ATTENTION] if device == "cuda" else [])]
    with sdpa_kernel(kernels):  # those that a stack of workers allows
        found = (vmap(attention) if stacked else attention)(*leaves)
    wanted_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = by_hand(*wanted_leaves, window)
    close = dict(rtol=0.03, atol=0.02) if dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.double(), wanted, **close)
    got = torch.autograd.grad((found * weight).sum(), leaves)
    want = torch.autograd.grad((wanted * weight.double()).sum(), wanted_leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, **close)
