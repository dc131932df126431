"""Makes the `w` through which the rules of a method see their worker's tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.anchor import Anchor
from palsgd.flat import Bucket, FlatModel
from palsgd.method_state import MethodState
from palsgd.offload import Window, windows
from palsgd.replica import Replica
from palsgd.sharding import local_tensor
from palsgd.tensors import WorkerTensors
from palsgd.transports.transport import Transport


class MethodView:
    """Makes the `w` of a method's slots, for the whole model or for one fragment."""

    def __init__(
        self,
        replica: Replica,
        anchor: Anchor,
        states: MethodState,
        inner: Optimizer,
        transport: Transport,
    ):
        self.replica, self.anchor, self.states = replica, anchor, states
        self._inner, self._transport = inner, transport
        self._group_of = [
            next(g for g, members in enumerate(replica.groups) if i in members)
            for i in range(len(replica.params))
        ]

    def whole(self, **known: Any) -> WorkerTensors:
        """All tensors of the model."""
        sources = self.states.sources(None) | {
            "local": self.replica.local,
            "anchor": lambda: self.anchor.views,
            "inner": lambda: self._whole_inner(self.replica.params),
        }
        return self._made(sources, groups=self.replica.groups, **known)

    # -- window by window, if the anchor is kept in host memory ---------------------------------

    def everywhere(self, **known: Any) -> Iterator[WorkerTensors]:
        """All tensors of the model: one `w`, or one for each window. Changes of a `w` are kept when
        the next one is asked for."""
        if not self.anchor.home.offloaded:
            yield self.whole(**known)
            return
        for window in self.windows():
            with self.in_window(window, window.copy(self.anchor.flat), **known) as w:
                yield w

    def gradients_everywhere(self, **known: Any) -> Iterator[WorkerTensors]:
        """The same of the tensors that have a gradient, with their gradients."""
        if not self.anchor.home.offloaded:
            yield self.with_gradients(**known)
            return
        for window in self.windows():
            anchor = window.copy(self.anchor.flat)
            with self.in_window(window, anchor, gradients=True, **known) as w:
                yield w

    def windows(self, fragment: int | None = None) -> Iterator[Window]:
        """The windows of the model, or of a fragment."""
        place = range(len(self.anchor.flat)) if fragment is None else self.anchor.ranges[fragment]
        return windows(self.replica.layout, place, self.anchor.home.device)

    @contextmanager
    def in_window(
        self,
        window: Window,
        anchor: Bucket,
        *,
        local: Callable[[], list[Tensor]] | None = None,
        gradients: bool = False,
        rates: Sequence[float] = (),
        rate_sums: Sequence[float] = (),
        **known: Any,
    ) -> Iterator[WorkerTensors]:
        """The tensors of a window, whose part of the anchor is given. Changes are kept on leaving,
        except those of the anchor, which belong to who made the copy. `local()` gives the pieces of
        the local model, if they are not those of the present one."""
        owners, params = anchor.owners(), self.replica.params
        cuts = Cuts(anchor)
        if gradients:
            cuts.chosen = [k for k, i in enumerate(owners) if params[i].grad is not None]
        group_of = [self._group_of[i] for i in cuts.pick(owners)]
        kept = self.states.local | self.states.common
        sources: dict[str, Callable[[], Any]] = {
            name: partial(_in_window, cuts, window, each) for name, each in kept.items()
        }
        sources |= {
            "local": local or (lambda: cuts.of([t.detach() for t in self.replica.local()])),
            "anchor": lambda: cuts.pick(anchor.parts()),
            "inner": lambda: InnerState(self._inner, params, cuts.of, lambda *_: None),
            "rates": lambda: [rates[g] for g in group_of],
            "rate_sums": lambda: [rate_sums[g] for g in group_of],
        }
        if gradients:
            sources["grad"] = lambda: cuts.of(self._gradients())
        yield self._made(sources, groups=self._groups(group_of), **known)
        window.store()
        cuts.put_back()

    def _gradients(self) -> list[Tensor]:
        """The gradients. A tensor without one stands in its own place, where nobody looks."""
        pairs = zip(self.replica.grads(), self.replica.local(), strict=True)
        return [x.detach() if g is None else g for g, x in pairs]

    # -- whole tensors, or fragments -------------------------------------------------------------

    def with_gradients(self, **known: Any) -> WorkerTensors:
        """The tensors that have a gradient, with their gradients."""
        have = [i for i, p in enumerate(self.replica.params) if p.grad is not None]
        for param in (self.replica.params[i] for i in have):
            if param.grad is not None and param.grad.is_sparse:  # a rule changes all rows
                param.grad = param.grad.to_dense()
        local, params = self.replica.local(), self.replica.params
        chosen = [params[i] for i in have]
        sources: dict[str, Callable[[], Any]] = {
            name: partial(_chosen, source, have)
            for name, source in self.states.sources(None).items()
        }
        sources |= {
            "local": lambda: [local[i] for i in have],
            "anchor": lambda: [self.anchor.views[i] for i in have],
            "grad": lambda: [local_tensor(p.grad) for p in chosen],  # type: ignore[arg-type]
            "inner": lambda: self._whole_inner(chosen),
        }
        return self._made(sources, groups=self._groups([self._group_of[i] for i in have]), **known)

    def _whole_inner(self, params: list[Tensor]) -> "InnerState":
        return InnerState(self._inner, params, lambda tensors: tensors, lambda *_: None)

    def fragment(
        self,
        fragment: int,
        local: Callable[[], list[Tensor]],
        *,
        rates: Sequence[float],
        rate_sums: Sequence[float],
        **known: Any,
    ) -> WorkerTensors:
        """The tensors of a fragment, or pieces of them. `local()` gives the pieces of the local
        model."""
        group_of = [self._group_of[i] for i in self.anchor.owners(fragment)]
        params = self.replica.params

        def cut(tensors: list[Tensor]) -> list[Tensor]:
            return self.anchor.pieces_of(fragment, tensors)

        def put_back(pieces: list[Tensor], tensors: list[Tensor]) -> None:
            self.anchor.put_back(fragment, pieces, tensors)

        sources = self.states.sources(fragment) | {
            "local": local,
            "anchor": lambda: self.anchor.pieces(fragment),
            "inner": lambda: InnerState(self._inner, params, cut, put_back),
            "rates": lambda: [rates[g] for g in group_of],
            "rate_sums": lambda: [rate_sums[g] for g in group_of],
        }
        return self._made(sources, groups=self._groups(group_of), **known)

    def local_pieces(self, fragment: int) -> list[Tensor]:
        """The pieces of the present local model that lie in the fragment."""
        return self.anchor.pieces_of(fragment, [t.detach() for t in self.replica.local()])

    def pieces_in(self, fragment: int, flat: Tensor) -> list[Tensor]:
        """The views of `flat`, which has a fragment's elements, tensor by tensor."""
        return Bucket(self.replica.layout, self.anchor.ranges[fragment].start, flat).parts()

    def _groups(self, group_of: list[int]) -> list[list[int]]:
        return [
            [i for i, group in enumerate(group_of) if group == g]
            for g in range(len(self.replica.groups))
        ]

    def _made(self, sources: dict[str, Callable[[], Any]], **known: Any) -> WorkerTensors:
        return WorkerTensors(
            sources,
            worker=self._transport.worker,
            workers=self._transport.workers,
            initial_rates=self.replica.initial_rates,
            _norm=self._norm,
            **self.states.scalars,
            **known,
        )

    def _norm(self, tensors: Iterable[Tensor]) -> float:
        total = torch.zeros(1, dtype=torch.float64, device=self.replica.device)
        for tensor in tensors:
            total += tensor.double().square().sum()
        self._transport.sum_over_shards(total)
        return float(total.sqrt())


class Cuts:
    """Pieces of tensors that lie in a window, and their way back."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self.chosen: list[int] | None = None  # of the window's tensors; None: all of them
        self._shown: list[tuple[list[Tensor], list[Tensor]]] = []  # pieces, and what they are of

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        pieces = self._bucket.parts(tensors)
        self._shown.append((pieces, tensors))
        return self.pick(pieces)

    def pick(self, found: list[Any]) -> list[Any]:
        return found if self.chosen is None else [found[k] for k in self.chosen]

    def put_back(self) -> None:
        """Write the pieces that are copies, as their tensors have gaps, into their tensors."""
        for pieces, tensors in self._shown:
            self._bucket.put_back(pieces, tensors)


def _in_window(cuts: Cuts, window: Window, kept: FlatModel) -> list[Tensor]:
    return cuts.pick(window.copy(kept.flat, writes=True).parts())


def _chosen(source: Callable[[], list[Tensor]], have: list[int]) -> list[Tensor]:
    tensors = source()
    return [tensors[i] for i in have]


class InnerState:
    """The inner optimizer's tensors by name. A name that it has not made yet is missing."""

    def __init__(
        self,
        inner: Optimizer,
        params: list[Tensor],
        cut: Callable[[list[Tensor]], list[Tensor]],
        put_back: Callable[[list[Tensor], list[Tensor]], None],
    ):
        self._inner, self._params, self._cut, self._put_back = inner, params, cut, put_back
        # the pieces, and the tensors they were cut from
        self._shown: list[tuple[list[Tensor], list[Tensor]]] = []

    def __contains__(self, name: str) -> bool:
        return self._found(name) is not None

    def __getitem__(self, name: str) -> list[Tensor]:
        """One tensor per parameter; an empty list if the inner optimizer has none of that name. A
        parameter without such a tensor has zeros in its place: it never had a gradient, or belongs
        to an optimizer of another kind. Values written into these zeros are lost."""
        found = self._found(name)
        if found is None:
            return []
        pieces = self._cut(found)
        self._shown.append((pieces, found))
        return pieces

    def put_back(self) -> None:
        """Write the pieces that are copies back into the inner optimizer's tensors."""
        for pieces, tensors in self._shown:
            self._put_back(pieces, tensors)

    def _found(self, name: str) -> list[Tensor] | None:
        state = self._inner.state
        tensors = [state[p].get(name) if p in state else None for p in self._params]
        if not any(isinstance(t, Tensor) for t in tensors):
            return None
        return [
            local_tensor(t if isinstance(t, Tensor) else torch.zeros_like(p))
            for t, p in zip(tensors, self._params, strict=True)
        ]
