"""Convolutions of many workers as one product of matrices for each.

vmap turns the convolutions of K workers into one with K groups, for which cuDNN runs K small
kernels. Here the patches of all images of a worker become the columns of a matrix, which the
worker's weights multiply: K products of one kernel. Patches take as much memory as a kernel has
places, times the images; whether that pays is found by trying (see stack.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Pair = tuple[int, int]


def convolutions(module: nn.Module) -> Iterator[nn.Conv2d]:
    """Those that can be computed from patches."""
    for each in module.modules():
        if (
            type(each) is nn.Conv2d
            and each.groups == 1
            and each.dilation == (1, 1)
            and each.padding_mode == "zeros"
            and not isinstance(each.padding, str)
        ):
            yield each


def ways(module: nn.Module) -> list[int]:
    """The numbers of channels that are worth trying: no convolution is computed from patches, or
    those of pictures alone, or all. cuDNN has no fast kernel for groups of three channels."""
    found = {each.in_channels for each in convolutions(module)}
    return sorted({max((n for n in found if n <= most), default=0) for most in (0, 4, 2**31)})


def unfold_convolutions(module: nn.Module, channels: int) -> None:
    """Let the convolutions of at most so many channels be computed from patches, where they can be,
    and the others by torch."""
    possible = set(convolutions(module))
    for each in module.modules():
        if type(each) is nn.Conv2d:
            small = each in possible and each.in_channels <= channels
            way = _from_patches if small else _by_torch
            each.forward = partial(way, each)  # type: ignore[method-assign]


def _from_patches(self: nn.Conv2d, x: Tensor) -> Tensor:
    if not self.training:  # one model is evaluated: nothing is stacked
        return _by_torch(self, x)
    x, weight, bias = _cast(x, self.weight, self.bias)
    out, _ = _convolve(x[None], weight[None], list(self.stride), list(self.padding))
    return out[0] if bias is None else out[0] + bias[:, None, None]


def _by_torch(self: nn.Conv2d, x: Tensor) -> Tensor:
    return self._conv_forward(*_cast(x, self.weight, self.bias))


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast does it for a convolution. Under vmap it does not: on a GPU it leaves the bias as
    it is, which is refused, and on a CPU everything."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    low = torch.get_autocast_dtype(device)
    return x.to(low), weight.to(low), None if bias is None else bias.to(low)


# The operators have compiled parts, so they cannot run while a CUDA graph is recorded.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)


# torch keeps compiled programs on disk by the names of their operators. An operator that returns
# something of another shape than before needs another name.
@torch.library.custom_op("palsgd::patched_conv2d", mutates_args=(), tags=_UNSAFE)
def _convolve(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    """x is [workers, images, channels, height, width], weight [workers, outputs, channels, kernel
    height, kernel width]. The patches, which the gradient needs, are the second result."""
    workers, outputs = weight.shape[:2]
    elements = _elements(x.shape, weight.shape, stride, padding)
    # detached, as torch would compile again for a tensor that needs a gradient
    given = x.detach(), weight.detach(), stride, padding
    patches, (images, height, width) = _fused(_patches, x, elements)(*given)
    out = torch.bmm(_aligned(weight.flatten(2), 2), patches)
    out = out.view(workers, outputs, images, height, width).transpose(1, 2)
    return out.contiguous(), patches


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    windows = _windows(x, weight, stride, padding)
    workers, images, channels, height, width, *kernel = windows.shape
    out = x.new_empty(workers, images, weight.shape[1], height, width)
    places = _rounded(channels * kernel[0] * kernel[1])
    return out, x.new_empty(workers, places, images * height * width)


def _patches(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, tuple[int, int, int]]:
    """For each worker a matrix: places of the kernel, places of all images. And images, height and
    width of the result."""
    windows = _windows(x, weight, stride, padding)
    places = windows.shape[1], windows.shape[3], windows.shape[4]
    found = windows.permute(0, 2, 5, 6, 1, 3, 4).reshape(len(x), -1, math.prod(places))
    return _aligned(found, 1), places


def _aligned(matrices: Tensor, axis: int) -> Tensor:
    """With zeros behind, so that rows begin where fast kernels for products can read them: the 75
    places of a kernel of 5 x 5 and three channels become 80."""
    size = matrices.shape[axis]
    more = _rounded(size) - size
    return pad(matrices, (*[0, 0] * (matrices.dim() - 1 - axis), 0, more)) if more else matrices


def _rounded(size: int) -> int:
    """Up to the next multiple of the 16 bytes that eight numbers of bf16 have."""
    return -(-size // 8) * 8


def _elements(
    shape: Sequence[int], kernel: Sequence[int], stride: list[int], padding: list[int]
) -> int:
    """Of the patches or of the padded images, whichever are more."""
    *images, channels, height, width = shape
    high, wide = height + 2 * padding[0], width + 2 * padding[1]
    rows, columns = (high - kernel[-2]) // stride[0] + 1, (wide - kernel[-1]) // stride[1] + 1
    places = _rounded(channels * kernel[-2] * kernel[-1])
    return math.prod(images) * max(channels * high * wide, rows * columns * places)


def _windows(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """A view: workers, images, channels, height, width, kernel height, kernel width."""
    kernel_height, kernel_width = weight.shape[-2:]
    padded = pad(x, (padding[1], padding[1], padding[0], padding[0]))
    return padded.unfold(3, kernel_height, stride[0]).unfold(4, kernel_width, stride[1])


@torch.library.custom_op("palsgd::patched_conv2d_weight_gradient", mutates_args=())
def _weight_gradient(d_out: Tensor, patches: Tensor, shape: list[int]) -> Tensor:
    places = math.prod(shape[2:])
    found = torch.bmm(_columns(d_out), patches.transpose(1, 2))
    return found[..., :places].reshape(shape).contiguous()


@_weight_gradient.register_fake
def _(d_out: Tensor, patches: Tensor, shape: list[int]) -> Tensor:
    return d_out.new_empty(shape)


@torch.library.custom_op("palsgd::patched_conv2d_input_gradient", mutates_args=(), tags=_UNSAFE)
def _input_gradient(
    d_out: Tensor, weight: Tensor, shape: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    workers, images, channels, height, width = shape
    kernel_height, kernel_width = weight.shape[-2:]
    rows, columns = d_out.shape[-2:]
    across = _aligned(weight.flatten(2), 2).transpose(1, 2)
    d_patches = torch.bmm(across, _columns(d_out)).detach()
    d_patches = d_patches[:, : channels * kernel_height * kernel_width].view(
        workers, channels, kernel_height, kernel_width, images, rows, columns
    )
    if stride == [1, 1]:
        elements = _elements(shape, weight.shape, stride, padding)
        padded = _fused(_summed, d_out, elements)(d_patches)
    else:
        padded = _added(d_patches, height + 2 * padding[0], width + 2 * padding[1], stride)
    inner = padded[..., padding[0] : padding[0] + height, padding[1] : padding[1] + width]
    return inner.transpose(1, 2).contiguous()


def _summed(d_patches: Tensor) -> Tensor:
    """The gradient of the padded images, as a sum over the places of the kernel, which one kernel
    computes."""
    height, width = d_patches.shape[2:4]
    return sum(  # type: ignore[return-value]
        pad(d_patches[:, :, i, j], (j, width - 1 - j, i, height - 1 - i))
        for i in range(height)
        for j in range(width)
    )


def _added(d_patches: Tensor, height: int, width: int, stride: list[int]) -> Tensor:
    """The same for strides. Each place of the kernel adds its part."""
    workers, channels, kernel_height, kernel_width, images, rows, columns = d_patches.shape
    padded = d_patches.new_zeros(workers, channels, images, height, width)
    for i in range(kernel_height):
        for j in range(kernel_width):
            down = slice(i, i + stride[0] * (rows - 1) + 1, stride[0])
            right = slice(j, j + stride[1] * (columns - 1) + 1, stride[1])
            padded[..., down, right] += d_patches[:, :, i, j]
    return padded


MOST = 2**31 - 1  # elements: compiled kernels count them in 32 bits, and read elsewhere beyond


def _fused(call: Callable[..., Any], x: Tensor, elements: int) -> Callable[..., Any]:
    """The call as one kernel, on a GPU, if that can count the elements of its larger side."""
    return _compiled(call) if x.is_cuda and elements <= MOST else call


SHAPES = 256  # that a process may compile a call for: every program of a study has its own


@cache
def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    # After eight shapes torch would no longer compile, with a warning.
    return torch._dynamo.config.patch(recompile_limit=SHAPES)(torch.compile(call))


@_input_gradient.register_fake
def _(
    d_out: Tensor, weight: Tensor, shape: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    return d_out.new_empty(shape)


def _columns(d_out: Tensor) -> Tensor:
    """Gradients of the results as the patches have them: workers, outputs, places of all images."""
    return d_out.transpose(1, 2).flatten(2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.stride, ctx.padding = inputs
    ctx.shape = list(x.shape)
    ctx.save_for_backward(weight, output[1])


def _backward(ctx: Any, d_out: Tensor, d_patches: Any) -> tuple[Tensor | None, ...]:
    weight, patches = ctx.saved_tensors
    d_x = None
    if ctx.needs_input_grad[0]:  # images of a batch need none
        d_x = _input_gradient(d_out, weight, ctx.shape, ctx.stride, ctx.padding)
    return d_x, _weight_gradient(d_out, patches, list(weight.shape)), None, None


_convolve.register_autograd(_backward, setup_context=_keep)


@_convolve.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """The workers of vmap join the first axis of one call. Workers that share their weights are
    images of one worker."""
    x, weight, stride, padding = inputs
    many = info.batch_size
    x = x.expand(many, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if in_dims[1] is None:
        out, patches = _convolve(x.transpose(0, 1).flatten(1, 2), weight, stride, padding)
        places = patches.unflatten(2, (many, -1))
        return (out.unflatten(1, (many, -1)), places), (1, 2)
    weight = weight.movedim(in_dims[1], 0)
    found = _convolve(x.flatten(0, 1), weight.flatten(0, 1), stride, padding)
    return tuple(each.unflatten(0, (many, -1)) for each in found), (0, 0)
