"""Causal attention, with or without a window, that stacked workers share one kernel for.

On a GPU torch's memory-efficient attention is the only fused kernel for fp32 and for masks, and it
fails under vmap. Attention treats each row of a batch by itself, so the rows of all workers are one
larger batch. That is what the vmap rule of this operator says. In half precision and without a
window torch's flash attention does the same by itself and is called directly, as are the kernels of
a CPU.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # the kernel wants masks whose rows start on multiples of so many elements


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """softmax(q k^T) v, where a token sees itself and the `window` - 1 tokens before it; 0: all
    before it. Products are not divided by the root of the size. Tensors are [rows, tokens, heads,
    size]."""
    if q.is_cuda and (window or q.dtype not in _HALF) and q.dtype != torch.float64:
        return _attention(q, k, v, window)
    near = _near(q.shape[1], window, q.device) if window else None
    mixed = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=near, is_causal=near is None, scale=1.0,
    )  # fmt: skip
    return mixed.transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return _forward(q, k, v, window)[0]


@torch.library.custom_op("palsgd::causal_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The result, and the logarithms of the sums, which its gradient needs."""
    bias = _bias(q, window)
    out, sums, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, True, 0.0, bias is None,
        scale=1.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), sums.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _ = q.shape
    whole = (tokens + 31) // 32 * 32  # as the kernel has it
    return q.new_empty(q.shape), q.new_empty(rows, heads, whole, dtype=torch.float32)


@torch.library.custom_op("palsgd::causal_attention_gradient", mutates_args=())
def _gradient(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    bias, unused = _bias(q, window), torch.zeros((), dtype=torch.int64)  # seeds of a dropout
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        d_out.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
        out.transpose(1, 2), sums, unused, unused, 0.0, [True, True, True, False], bias is None,
        scale=1.0,
    )  # fmt: skip
    d_q, d_k, d_v = (each.transpose(1, 2).contiguous() for each in found[:3])
    return d_q, d_k, d_v


@_gradient.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_out: Tensor, d_sums: Any) -> tuple[Tensor | None, ...]:
    return *_gradient(d_out, *ctx.saved_tensors, ctx.window), None


_forward.register_autograd(_backward, setup_context=_keep)


@_forward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """The workers of vmap join the rows of one call."""
    *tensors, window = inputs
    joined = [
        (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(tensors, in_dims, strict=False)
    ]
    found = _forward(*joined, window)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


def _bias(q: Tensor, window: int) -> Tensor | None:
    """What is added to the products: minus infinity where a token does not look."""
    rows, tokens, heads, _ = q.shape
    if not 0 < window < tokens:
        return None
    return _hidden(tokens, window, q.device, q.dtype).expand(rows, heads, tokens, tokens)


@lru_cache(maxsize=8)
def _hidden(tokens: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    whole = (tokens + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    bias = torch.zeros(tokens, whole, dtype=dtype, device=device)
    seen = _near(tokens, window, device)
    bias[:, :tokens].masked_fill_(~seen, float("-inf"))
    return bias[:, :tokens]


@lru_cache(maxsize=8)
def _near(tokens: int, window: int, device: torch.device) -> Tensor:
    """Which tokens a token sees."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)
