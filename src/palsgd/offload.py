"""The global model in host memory: `offload=True` keeps the anchor, the states of the outer
optimizer and of the method, messages and residues there.

Arithmetic is done on the device of the model, window by window. A window is a range of the flat
model: its numbers are copied to the device, changed there by the same kernels that would change the
whole tensors, and copied back. All rules are elementwise, so the weights are those of a run that
keeps everything on the device, bit for bit. On a CPU the windows are copies too, so that the same
code runs there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from palsgd.flat import Bucket, Layout, Place

WINDOW = 1 << 21  # elements: 8 MiB in fp32, which a bus copies at full speed
ALIGNED = 64  # elements: whole vectors of any processor, and whole lines of its cache
MESSAGE = 1 << 23  # elements of the longest message on the device, 32 MiB in fp32

# Optimizers whose step is not elementwise, or that keep no state of a parameter's shape.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Home(NamedTuple):
    """Where the tensors of the global model are kept."""

    device: torch.device  # of the model, where arithmetic is done
    offloaded: bool = False

    @property
    def storage(self) -> torch.device:
        return torch.device("cpu") if self.offloaded else self.device

    @property
    def pinned(self) -> bool:
        """Only page-locked memory is copied to a GPU at full speed."""
        return self.offloaded and self.device.type == "cuda"

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.storage, pin_memory=self.pinned)

    def aside(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, kept where the global model is kept."""
        if not self.offloaded:
            return tensor.clone()
        kept = torch.empty_like(tensor, device=self.storage, pin_memory=self.pinned)
        return kept.copy_(tensor)


class Window:
    """A range of the flat model, with copies on the device of what is kept in host memory."""

    def __init__(self, layout: Layout, place: range, device: torch.device):
        self._layout, self.place, self.device = layout, place, device
        self._changed: list[tuple[Tensor, Tensor]] = []  # where it is kept, the copy

    def copy(self, kept: Tensor, *, start: int = 0, writes: bool = False) -> Bucket:
        """The numbers of the range on the device. `kept` has those of the flat model from `start`
        on. With `writes`, `store` copies them back."""
        source = kept[self.place.start - start : self.place.stop - start]
        found = source.to(self.device, copy=True)
        if writes:
            self._changed.append((source, found))
        return Bucket(self._layout, self.place.start, found)

    def read(self, tensors: list[Tensor], dtype: torch.dtype) -> Bucket:
        """The numbers of tensors that lie on the device."""
        flat = torch.empty(len(self.place), dtype=dtype, device=self.device)
        bucket = Bucket(self._layout, self.place.start, flat)
        bucket.read(tensors)
        return bucket

    def store(self) -> None:
        for kept, changed in self._changed:
            kept.copy_(changed)
        self._changed.clear()


def windows(layout: Layout, place: range, device: torch.device) -> Iterator[Window]:
    """The windows of a range of the flat model, one after the other.

    A tensor is cut at multiples of ALIGNED elements from its first element in the range. Kernels on
    CPUs compute the elements of whole vectors and those behind the last vector by different
    instructions, which may round differently. Such a cut changes none of a tensor's vectors.
    """
    low = place.start
    while low < place.stop:
        high = min(low + WINDOW, place.stop)
        if high < place.stop:
            first = max(layout.start_of(high), place.start)
            high = first + (high - first) // ALIGNED * ALIGNED
        yield Window(layout, range(low, high), device)
        low = high


def fill(flat: Tensor, layout: Layout, place: range, tensors: list[Tensor], home: Home) -> None:
    """Copy the numbers of `tensors` that lie in a range to `flat`, which is kept in host memory."""
    for window in windows(layout, place, home.device):
        low, high = (bound - place.start for bound in (window.place.start, window.place.stop))
        flat[low:high].copy_(window.read(tensors, flat.dtype).flat)


# -- the outer optimizer ---------------------------------------------------------------------------


def check_elementwise(outer: Optimizer) -> None:
    kind = type(outer).__name__
    if kind in _NOT_ELEMENTWISE:
        raise ValueError(
            f"offload=True takes the outer step in pieces, and that of {kind} is not elementwise; "
            "use palsgd.nesterov() or torch.optim.Adam, or leave offload out"
        )


class OuterPieces:
    """Lets an outer optimizer whose parameters are kept in host memory step on windows of them.

    A parameter that lies in several windows takes several steps in one sync, each on other
    elements. Each of these steps begins with the numbers that the parameter's state had before the
    sync, such as Adam's count of steps, so that together they are one step.
    """

    def __init__(self, outer: Optimizer, layout: Layout):
        self._outer, self._layout = outer, layout
        self._states: dict[Tensor, _State] = {}  # of the parameters that this sync has stepped

    def begin(self) -> None:
        """A sync begins."""
        self._states.clear()

    @contextmanager
    def on_device(
        self, params: list[nn.Parameter], places: list[Place], anchor: Bucket, mean: Bucket
    ) -> Iterator[None]:
        """Inside, the parameters that lie in the window of `anchor` have their values, states and
        gradients on the device, and all others have no gradient."""
        known = {place.tensor: (param, place) for param, place in zip(params, places, strict=True)}
        parts = zip(anchor.places(), anchor.parts(), mean.parts(), strict=True)
        pieces = [
            _Piece(self._layout, *known[here.tensor], here, value, gradient)
            for here, value, gradient in parts
        ]
        for piece in pieces:
            self._enter(piece)
        try:
            yield
        finally:
            for piece in pieces:
                self._leave(piece)

    def _enter(self, piece: "_Piece") -> None:
        param, state = piece.param, self._outer.state
        if param not in self._states:
            self._states[param] = _State(piece, state.get(param, {}))
        entry = self._states[param].on_device(piece, numbers_too=self._keeps_numbers(param))
        state.pop(param, None)
        if entry:
            state[param] = entry
        param.data = piece.value
        param.grad = piece.gradient

    def _leave(self, piece: "_Piece") -> None:
        param, state = piece.param, self._outer.state
        found = self._states[param].kept(piece, state.pop(param, {}))
        param.grad = None
        param.data = piece.whole
        if found:
            state[param] = found

    def _keeps_numbers(self, param: nn.Parameter) -> bool:
        """Does the optimizer keep the numbers of its state on the device of the parameters? Fused
        and capturable ones do."""
        groups = self._outer.param_groups
        group = next(g for g in groups if any(p is param for p in g["params"]))
        return bool(group.get("fused") or group.get("capturable"))


class _Piece:
    """The elements of an outer parameter that lie in a window."""

    def __init__(
        self,
        layout: Layout,
        param: nn.Parameter,
        place: Place,
        here: Place,
        value: Tensor,
        gradient: Tensor,
    ):
        self._layout, self.param, self._place, self._here = layout, param, place, here
        self.value, self.gradient = value, gradient  # on the device
        self.whole = param.data  # in host memory

    def cut(self, kept: Tensor) -> Tensor:
        """The view of these elements in a tensor of the parameter's shape."""
        part, of = self._here.part, self._place.part
        if part == of:
            return kept
        assert part is not None
        flat = self._layout.flattened(self._place.tensor, kept) if of is None else kept
        start = part.start - (0 if of is None else of.start)
        return flat[start : start + part.stop - part.start]

    def dense(self, kept: Tensor) -> Tensor:
        """A tensor of the parameter's shape whose flat form is a view, not a copy."""
        if self._place.part is None:
            return self._layout.dense(self._place.tensor, kept)
        return kept.contiguous()

    def new(self, like: Tensor) -> Tensor:
        """A tensor of the parameter's shape in host memory."""
        pinned = self.whole.is_pinned()
        return torch.empty_like(self.whole, dtype=like.dtype, pin_memory=pinned)


class _State:
    """The state of an outer parameter, in host memory: as it was before the sync, and as it will be
    after the sync."""

    def __init__(self, piece: _Piece, before: dict[str, Any]):
        shape = piece.whole.shape
        self._shaped = {k: piece.dense(v) for k, v in before.items() if _is_shaped(k, v, shape)}
        self._numbers = {k: v for k, v in before.items() if k not in self._shaped}
        self._made: dict[str, Tensor] = {}  # tensors that the first step of this sync has made

    def on_device(self, piece: _Piece, *, numbers_too: bool) -> dict[str, Any]:
        """A copy of the state before the sync, for one piece."""
        device = piece.value.device
        found: dict[str, Any] = {
            key: piece.cut(kept).to(device, copy=True) for key, kept in self._shaped.items()
        }
        for key, value in self._numbers.items():
            if isinstance(value, Tensor):
                value = value.to(device if numbers_too else value.device, copy=True)
            found[key] = value
        return found

    def kept(self, piece: _Piece, after: dict[str, Any]) -> dict[str, Any]:
        """Take the state of a piece after its step. Returns the parameter's state."""
        numbers = {}
        for key, value in after.items():
            if not _is_shaped(key, value, piece.value.shape):
                numbers[key] = value
                continue
            if key not in self._shaped and key not in self._made:
                self._made[key] = piece.new(value)
            piece.cut((self._shaped | self._made)[key]).copy_(value)
        return self._shaped | self._made | numbers if after else {}


def _is_shaped(key: str, value: Any, shape: torch.Size) -> bool:
    """Is an entry of a state a tensor of the parameter's shape? The count of steps never is."""
    return isinstance(value, Tensor) and value.shape == shape and key != "step"
