"""Where each tensor lies in one flat buffer, and how to move ranges of it in and out."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Layout:
    """Tensors laid end to end without gaps.

    A flat buffer follows each tensor's memory order, so that a channels-last weight is one
    run of memory in it too. Ranges may cut through tensors: a bucket is any range, and a tensor
    larger than a bucket simply spans several.
    """

    def __init__(self, tensors: list[Tensor]):
        # Tensors of odd length go last: behind one of them nothing would start on a 16-byte
        # boundary, and the vectorized kernels would fall back to their scalar path.
        self._order = sorted(range(len(tensors)), key=lambda i: tensors[i].numel() % 4 != 0)
        self._sizes = [t.numel() for t in tensors]
        self._shapes = [t.shape for t in tensors]
        self._strides = [_memory_strides(t) for t in tensors]
        self._starts = [0] * len(tensors)
        self.size = 0
        for i in self._order:
            self._starts[i] = self.size
            self.size += self._sizes[i]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside `flat`, in the order and shape they were given."""
        return [
            flat[start : start + size].as_strided(shape, stride)
            for start, size, shape, stride in zip(
                self._starts, self._sizes, self._shapes, self._strides, strict=True
            )
        ]

    def spans(self, low: int, high: int) -> Iterator[tuple[int, slice, slice]]:
        """For each tensor in the range: its index, its part, and that part's place in the range."""
        for i in self._order:
            start = self._starts[i]
            first, last = max(low, start), min(high, start + self._sizes[i])
            if first < last:
                yield i, slice(first - start, last - start), slice(first - low, last - low)

    def read(self, tensors: list[Tensor], low: int, out: Tensor) -> None:
        """Copy the range of `out.numel()` elements from `low` out of `tensors`."""
        for i, part, place in self.spans(low, low + out.numel()):
            out[place].copy_(self._flattened(tensors[i], i)[part])

    def subtract(self, flat: Tensor, tensors: list[Tensor], low: int, out: Tensor) -> None:
        """`flat` minus `tensors`, over the range of `out.numel()` elements from `low`."""
        flat = flat[low : low + out.numel()]
        for i, part, place in self.spans(low, low + out.numel()):
            torch.sub(flat[place], self._flattened(tensors[i], i)[part], out=out[place])

    def write(self, tensors: list[Tensor], low: int, source: Tensor) -> None:
        """The way back: the range of `source.numel()` elements from `low`, into `tensors`."""
        for i, part, place in self.spans(low, low + source.numel()):
            flat = self._flattened(tensors[i], i)
            flat[part].copy_(source[place])
            if flat.data_ptr() != tensors[i].data_ptr():  # was a copy, not a view
                tensors[i].copy_(flat.as_strided(self._shapes[i], self._strides[i]))

    def _flattened(self, tensor: Tensor, i: int) -> Tensor:
        """One-dimensional in this layout's memory order: a view wherever strides allow one."""
        if tensor.stride() != self._strides[i]:
            tensor = torch.empty_strided(
                self._shapes[i], self._strides[i], dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((self._sizes[i],), (1,))


def _memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory without gaps, else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
