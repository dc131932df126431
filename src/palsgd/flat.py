"""Where each tensor lies in one flat buffer, and how ranges of that buffer are copied into buckets
to be sent."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# elements: a fragment starts at a multiple, as vectorized kernels and 8-byte words must
_ALIGNED = 64


class Layout:
    """Tensors laid end to end without gaps.

    A flat buffer has the elements of a tensor in the tensor's memory order, so that a channels-last
    weight is copied as one run of memory.
    """

    def __init__(self, tensors: list[Tensor]):
        # Tensors whose length is no multiple of 4 go last. A tensor behind one of them would not
        # start on a 16-byte boundary, and vectorized kernels would take their scalar path for it.
        self.order = sorted(range(len(tensors)), key=lambda i: tensors[i].numel() % 4 != 0)
        self.shapes = [t.shape for t in tensors]
        self.strides = [_memory_strides(t) for t in tensors]
        self.sizes = [t.numel() for t in tensors]
        self.starts = [0] * len(tensors)
        self.size = 0
        for i in self.order:
            self.starts[i] = self.size
            self.size += self.sizes[i]
        self._bounds = sorted(self.starts)

    def start_of(self, place: int) -> int:
        """Where the tensor begins that has the element at `place`."""
        return self._bounds[bisect_right(self._bounds, place) - 1]

    def view(self, i: int, buffer: Tensor, start: int) -> Tensor:
        """Tensor `i` in the elements of `buffer` from `start` on."""
        place = buffer[start : start + self.sizes[i]]
        return place.as_strided(self.shapes[i], self.strides[i])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside `flat`, in the order and shape they were given."""
        return [self.view(i, flat, start) for i, start in enumerate(self.starts)]

    def dense(self, i: int, tensor: Tensor) -> Tensor:
        """Tensor `i` with this layout's strides: `tensor` itself if it has these strides, else a
        copy."""
        if tensor.stride() == self.strides[i]:
            return tensor
        shape, strides = self.shapes[i], self.strides[i]
        fresh = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        return fresh.copy_(tensor)

    def flattened(self, i: int, tensor: Tensor) -> Tensor:
        """Tensor `i` in one dimension and in this layout's memory order: a view if the strides
        allow one, else a copy."""
        return self.dense(i, tensor).as_strided((self.sizes[i],), (1,))


class Place(NamedTuple):
    """Where a tensor, or a piece of it, lies in a range of a flat model."""

    tensor: int
    part: slice | None  # the elements of the tensor, in memory order; None: all of them
    place: slice  # in the range


class Bucket:
    """Elements [low, high) of a flat model. All buckets of a sync use the same memory, one after
    the other.

    The range may cut through tensors. A tensor that is larger than a bucket lies in several
    buckets.
    """

    def __init__(self, layout: Layout, low: int, buffer: Tensor):
        self._layout, self.low, self.flat = layout, low, buffer
        self._whole: list[tuple[int, Tensor]] = []  # tensor, its view in the buffer
        self._cut: list[tuple[int, slice, slice]] = []  # tensor, the part of it, the part's place
        high = low + buffer.numel()
        for i in layout.order:
            start, stop = layout.starts[i], layout.starts[i] + layout.sizes[i]
            first, last = max(low, start), min(high, stop)
            empty_here = start == stop and (low <= start < high or start == high == layout.size)
            if first >= last and not empty_here:
                continue
            if empty_here or (first, last) == (start, stop):
                self._whole.append((i, layout.view(i, buffer, start - low)))
            else:
                place = slice(first - low, last - low)
                self._cut.append((i, slice(first - start, last - start), place))

    def read(self, tensors: list[Tensor]) -> None:
        """Fill the bucket from `tensors`."""
        if self._whole:
            views = [view for _, view in self._whole]
            torch._foreach_copy_(views, [tensors[i] for i, _ in self._whole])
        for i, part, place in self._cut:
            self.flat[place].copy_(self._layout.flattened(i, tensors[i])[part])

    def write(self, tensors: list[Tensor]) -> None:
        """Set `tensors`, as far as they are in this range, from the bucket."""
        if self._whole:
            views = [view for _, view in self._whole]
            torch._foreach_copy_([tensors[i] for i, _ in self._whole], views)
        for i, part, place in self._cut:
            flat = self._layout.flattened(i, tensors[i])
            flat[part].copy_(self.flat[place])
            if flat.data_ptr() != tensors[i].data_ptr():  # was a copy, not a view
                tensors[i].copy_(self._layout.view(i, flat, 0))

    def parts(self, tensors: list[Tensor] | None = None) -> list[Tensor]:
        """The elements of the range, tensor by tensor: views of the bucket or, if given, of
        `tensors`. For a tensor that is cut, the part is the flat piece that lies in this range."""
        found: list[tuple[int, Tensor]] = []
        for i, view in self._whole:
            found.append((i, view if tensors is None else self._layout.dense(i, tensors[i])))
        for i, part, place in self._cut:
            if tensors is None:
                found.append((i, self.flat[place]))
            else:
                found.append((i, self._layout.flattened(i, tensors[i])[part]))
        return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]

    def owners(self) -> list[int]:
        """The index of the tensor that each of `parts` belongs to."""
        return sorted([i for i, _ in self._whole] + [i for i, _, _ in self._cut])

    def places(self) -> list[Place]:
        """Where each of `parts` lies."""
        whole = [self._place_of(i) for i, _ in self._whole]
        cut = [Place(i, part, place) for i, part, place in self._cut]
        return sorted(whole + cut, key=lambda found: found.tensor)

    def _place_of(self, i: int) -> Place:
        start = self._layout.starts[i] - self.low
        return Place(i, None, slice(start, start + self._layout.sizes[i]))

    def put_back(self, parts: list[Tensor], tensors: list[Tensor]) -> None:
        """Write the parts that `parts(tensors)` had to copy back into `tensors`."""
        whole, cut = dict(self._whole), {i: part for i, part, _ in self._cut}
        for i, part in zip(self.owners(), parts, strict=True):
            if tensors[i].stride() == self._layout.strides[i]:
                continue  # a view
            if i in whole:
                tensors[i].copy_(part)
            else:
                flat = self._layout.flattened(i, tensors[i])
                flat[cut[i]].copy_(part)
                tensors[i].copy_(self._layout.view(i, flat, 0))

    def add(self, tensors: list[Tensor]) -> None:
        """Add the bucket to `tensors`, as far as they are in this range."""
        for i, view in self._whole:
            tensors[i].add_(view)
        for i, part, place in self._cut:
            flat = self._layout.flattened(i, tensors[i])
            flat[part].add_(self.flat[place])
            if flat.data_ptr() != tensors[i].data_ptr():  # was a copy, not a view
                tensors[i].copy_(self._layout.view(i, flat, 0))

    def part(self, place: range) -> Tensor:
        """The elements of this range that lie at `place` of the flat model."""
        return self.flat[place.start - self.low : place.stop - self.low]

    def part_of(self, flat: Tensor) -> Tensor:
        """The elements of this range in another flat model."""
        return flat[self.low : self.low + self.flat.numel()]

    def subtract(self, flat: Tensor, views: list[Tensor], tensors: list[Tensor]) -> None:
        """Fill the bucket with `flat` minus `tensors`. `views` are the views of `flat`, tensor by
        tensor."""
        minuend = self.part_of(flat)
        if flat.is_cuda:  # one kernel per tensor takes longer than two more passes over memory
            self.read(tensors)
            torch.sub(minuend, self.flat, out=self.flat)
            return
        for i, view in self._whole:
            torch.sub(views[i], tensors[i], out=view)
        for i, part, place in self._cut:
            difference = self.flat[place]
            torch.sub(minuend[place], self._layout.flattened(i, tensors[i])[part], out=difference)

    def subtract_in_order(
        self, flat: Tensor, views: list[Tensor], tensors: list[Tensor], width: int
    ) -> Iterator[int]:
        """Do what `subtract` does on a CPU, from the first element to the last. Yields the number
        of elements that are filled, at least every `width` elements within a tensor that has no
        gaps."""
        minuend, whole = self.part_of(flat), dict(self._whole)
        for i, part, place in self._in_order:
            dense = tensors[i].stride() == self._layout.strides[i]
            if part is None and (place.stop - place.start <= width or not dense):
                torch.sub(views[i], tensors[i], out=whole[i])
                yield place.stop
                continue
            source = self._layout.flattened(i, tensors[i])[part or slice(None)]
            for low in range(place.start, place.stop, width):
                cut = slice(low, min(low + width, place.stop))
                subtrahend = source[low - place.start : cut.stop - place.start]
                torch.sub(minuend[cut], subtrahend, out=self.flat[cut])
                yield cut.stop

    @cached_property
    def _in_order(self) -> list[Place]:
        return sorted(self.places(), key=lambda found: found.place.start)


class Buckets:
    """A part of a layout, cut into ranges of at most `width` elements. All ranges share one buffer.
    The buffer has room for the numbers that are sent behind the first range."""

    def __init__(self, layout: Layout, part: range, width: int, buffer: Tensor):
        self.ranges = [
            Bucket(layout, low, buffer[: min(width, part.stop - low)])
            for low in range(part.start, max(part.start + 1, part.stop), width)
        ]


class FlatModel:
    """Tensors of the model's shapes in one flat buffer, with views of each tensor and each
    fragment.

    The bounds of a fragment may cut a tensor in two. The fragment then has a piece of that tensor.
    """

    def __init__(
        self,
        layout: Layout,
        ranges: list[range],
        *,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
    ):
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device, pin_memory=pinned)
        self.views, self.ranges = layout.views(self.flat), ranges
        self._fragments = [Bucket(layout, r.start, self.flat[r.start : r.stop]) for r in ranges]

    def part(self, fragment: int) -> Tensor:
        """The flat elements of a fragment."""
        return self._fragments[fragment].flat

    def pieces(self, fragment: int) -> list[Tensor]:
        """The fragment tensor by tensor."""
        return self._fragments[fragment].parts()

    def pieces_of(self, fragment: int, tensors: list[Tensor]) -> list[Tensor]:
        """The pieces of `tensors` at the places of `pieces`. A piece is a view, unless its tensor
        has gaps in memory; then it is a copy, which `put_back` writes back."""
        return self._fragments[fragment].parts(tensors)

    def write(self, fragment: int, tensors: list[Tensor]) -> None:
        """Set the elements of `tensors` that lie in the fragment from this buffer."""
        self._fragments[fragment].write(tensors)

    def put_back(self, fragment: int, pieces: list[Tensor], tensors: list[Tensor]) -> None:
        self._fragments[fragment].put_back(pieces, tensors)

    def owners(self, fragment: int) -> list[int]:
        """The index of the tensor that each of `pieces` belongs to."""
        return self._fragments[fragment].owners()

    def places(self, fragment: int) -> list[Place]:
        """Where each of `pieces` lies in the fragment."""
        return self._fragments[fragment].places()


def split_evenly(size: int, count: int) -> list[range]:
    """`count` parts of a flat buffer. They are equally long, except that each starts at an aligned
    place."""
    if count == 1:
        return [range(size)]
    if size < 2 * count:
        raise ValueError(
            f"fragments={count} needs at least {2 * count} elements, two for each, and the model "
            f"has {size}; use fewer fragments"
        )
    aligned = _ALIGNED if size >= 16 * _ALIGNED * count else 2
    bounds = [size * i // count // aligned * aligned for i in range(count)] + [size]
    return [range(low, high) for low, high in pairwise(bounds)]


def _memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory without gaps, else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
