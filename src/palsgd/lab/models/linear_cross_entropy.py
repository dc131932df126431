"""The last layer of a language model and its loss as one function, in chunks of tokens.

A table of logits has a row per token and a column per word: for 131,072 tokens and 50,257 words in
fp32, 26 GB, several times over with what autograd keeps. But the gradient of the mean
cross-entropy needs nothing from later than the logits themselves:

    d loss / d logits = (softmax(logits) - onehot(target)) / count

so for each chunk the logits are computed and replaced by their gradient, the gradients of `hidden`
and `weight` are computed from it, and the chunk's memory is freed. The backward pass only scales
these gradients.

It is a custom operator of torch, so that torch.compile does not look inside and vmap calls it once
for all workers. The worker axis is the first one, and has length 1 without vmap.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

log = logging.getLogger("palsgd")

CHUNK_BYTES = 2**30  # of logits at a time
ALIGNED = 64  # words; the fast matrix kernels want rows that start on a multiple of 16 bytes


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int = -100
) -> Tensor:
    """The mean of cross_entropy(hidden @ weight.T, targets) over targets that are not `ignore`.

    `hidden` is [tokens, width], `weight` [words, width]. Under autocast the products run in its
    precision and the loss in fp32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    if not torch.is_grad_enabled():
        return _loss_alone(hidden, weight, targets, ignore)
    if hidden.dtype == torch.float16:  # a loss scale would overflow inside without an error
        raise ValueError("linear_cross_entropy in float16 overflows; use bfloat16 or float32")
    known = targets != ignore
    share = known.to(_wide(hidden)) / known.sum().clamp(min=1)
    losses, _, _ = _losses_and_gradients(
        hidden[None], weight[None], targets.where(known, 0)[None], share[None]
    )
    return losses[0]


def _loss_alone(hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """The loss without gradients, for evaluation, which takes a third of the matrix products."""
    rows = max(1, CHUNK_BYTES // (len(weight) * hidden.element_size()))
    sums = [
        cross_entropy((h @ weight.T).to(_wide(h)), t, ignore_index=ignore, reduction="sum")
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.stack(sums).sum() / (targets != ignore).sum().clamp(min=1)


# The operator has compiled parts, so it cannot run while a CUDA graph is recorded.
@torch.library.custom_op(
    "palsgd::linear_cross_entropy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each worker, its tokens weighted by `share`, and the gradients of that loss."""
    workers, words = weight.shape[:2]
    padded = pad(weight, (0, 0, 0, -words % ALIGNED))
    losses = torch.zeros(workers, dtype=_wide(hidden), device=hidden.device)
    d_hidden = hidden.new_empty(hidden.shape)
    d_weight = torch.zeros(padded.shape, dtype=_wide(hidden), device=hidden.device)
    rows = max(1, CHUNK_BYTES // (workers * padded.shape[1] * hidden.element_size()))
    for h, d_h, target, part in zip(
        *(x.split(rows, dim=1) for x in (hidden, d_hidden, targets, share)), strict=True
    ):
        logits = torch.bmm(h, padded.transpose(1, 2))
        loss, d_logits = _loss_and_gradient(logits, target, part, words)
        losses += loss
        d_h.copy_(torch.bmm(d_logits, padded))
        d_weight += torch.bmm(d_logits.transpose(1, 2), h)
    return losses, d_hidden, d_weight[:, :words].to(weight.dtype).contiguous()


@_losses_and_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    losses = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
    return losses, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _keep_gradients(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, d_losses: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight = ctx.saved_tensors
    by = d_losses.view(-1, 1, 1)
    return d_hidden * by.to(d_hidden.dtype), d_weight * by.to(d_weight.dtype), None, None


_losses_and_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@_losses_and_gradients.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Any, Any]:
    """The workers of vmap join the leading axis of one call."""
    stacked = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(inputs, in_dims, strict=True)
    ]
    found = _losses_and_gradients(*(x.flatten(0, 1) for x in stacked))
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0, 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _plain(logits: Tensor, targets: Tensor, share: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Per worker the sum of share * cross-entropy over the first `words` columns, and its
    gradient in the logits' own dtype."""
    z = logits.to(_wide(logits))
    column = torch.arange(z.shape[-1], device=z.device)
    z = z.where(column < words, float("-inf"))
    log_sum = torch.logsumexp(z, dim=-1)
    hit = z.gather(-1, targets[..., None])[..., 0]
    loss = ((log_sum - hit) * share).sum(dim=-1)
    onehot = (column == targets[..., None]).to(z.dtype)
    d_logits = ((z - log_sum[..., None]).exp() - onehot) * share[..., None]
    return loss, d_logits.to(logits.dtype)


# One program for all sizes: torch gives up compiling after eight.
_compiled = torch.compile(_plain, dynamic=True)


def _gains_from_fusion(logits: Tensor) -> bool:
    return logits.is_cuda


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, share: Tensor, words: int
) -> tuple[Tensor, Tensor]:
    """What `_plain` computes. On a GPU its dozen passes over the logits are fused into two."""
    global _compiled
    if not _gains_from_fusion(logits):
        return _plain(logits, targets, share, words)
    try:
        with torch.autocast(logits.device.type, enabled=False):  # another program otherwise
            return _compiled(logits, targets, share, words)
    except RuntimeError as error:
        log.warning("linear_cross_entropy: slower, as torch.compile says: %s", error)
        _compiled = _plain
        return _plain(logits, targets, share, words)
