"""The gradient of one worker, replayed as a CUDA graph.

A model of many small layers keeps a GPU waiting for the host, which starts hundreds of kernels in
each step. A graph starts them all at once. What the host decides while the graph is recorded stays
decided: a loss that does something else from step to step must not be recorded. So graphs are made
only if they are asked for, and the first replay is compared with a gradient that is computed
anew.

Random numbers may be drawn: a replay reads the state of torch's generator, and moves it on."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from palsgd.simulator.stacking_checks import first_line

log = logging.getLogger("palsgd")

Loss = Callable[[nn.Module, Any], Tensor]
EAGER_STEPS = 3  # before recording: they choose algorithms and fill caches


class Gradient:
    """`loss(model, batch)` and its gradients, in the parameters' `grad`."""

    def __init__(self, model: nn.Module, loss: Loss):
        self.model, self.loss = model, loss

    def __call__(self, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()
        # without its history, which would keep what belongs to this step alive in the next one
        return loss.detach()


class Graphs:
    """What the graphs of one run's workers have in common. They are replayed one after another, so
    that they share memory, but for gradients: where these are averaged, the first worker goes on
    to its next one before the last has taken its step. If one cannot be recorded, none is
    replayed."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.may = True

    def give_up(self, device: torch.device, reason: str) -> None:
        self.may = False
        log.warning("palsgd.simulate: gradients are no CUDA graph, because %s", reason)
        # The error's frames, which refer to each other, keep what was recorded of the backward
        # pass, and torch would go on with it on a stream that is no more used.
        gc.collect()
        # After a recording that failed, torch 2.11 takes the generator to be in it for ever, and
        # refuses dropout. A copy of its state is in none. (Nor does it end the recording for its
        # memory, which therefore keeps what this run has freed until the process ends.)
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())


class GraphedGradient(Gradient):
    def __init__(self, model: nn.Module, loss: Loss, graphs: Graphs):
        super().__init__(model, loss)
        self._graphs, self._left = graphs, EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._form: Any = None
        self._result = torch.zeros(())
        self._grads: list[Tensor | None] = []
        self._places: list[int] = []

    def __call__(self, batch: Any) -> Tensor:
        if self._left > 0:
            self._left -= 1
            return super().__call__(batch)
        if self._graph is None and self._graphs.may:
            self._record(batch)
        leaves, form = pytree.tree_flatten(batch)
        if self._graph is None or not self._graphs.may or not self._fits(leaves, form):
            return super().__call__(batch)
        self._replay(leaves)
        return self._result.clone()

    def _record(self, batch: Any) -> None:
        """Record a gradient on this batch. The buffers, which a forward pass changes, and the
        random numbers stay as they were."""
        leaves, self._form = pytree.tree_flatten(batch)
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        static = pytree.tree_unflatten(self._inputs, self._form)
        params = list(self.model.parameters())
        device, reason = params[0].device, ""
        try:
            with self._as_before():
                super().__call__(static)
                want = [p.grad for p in params]
            self._grads = [None if g is None else torch.empty_like(g) for g in want]
            graph = torch.cuda.CUDAGraph()
            with self._as_before(), _recording(graph, self._graphs.pool):
                self._result = super().__call__(static)
                self._copy_out()
            self._graph, self._places = graph, [p.data_ptr() for p in params]
            with self._as_before():
                self._replay(self._inputs)
            if not _close(self._grads, want):
                reason = "a replay computes something else"
        except RuntimeError as error:
            reason = _reason(error)
        if reason:
            self._graph, self._inputs, self._grads = None, [], []
            self._graphs.give_up(device, reason)

    def _copy_out(self) -> None:
        """From the memory that graphs share to this worker's own, in the same replay."""
        found = [p.grad for p in self.model.parameters()]
        if [g is None for g in found] != [own is None for own in self._grads]:
            raise RuntimeError("a recorded loss depends on other parameters than the one before")
        torch._foreach_copy_([own for own in self._grads if own is not None],
                             [g for g in found if g is not None])  # fmt: skip

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """On leaving, buffers and random numbers are what they were, and there are no gradients."""
        device = next(self.model.parameters()).device
        random = torch.cuda.get_rng_state(device)
        buffers = [b.clone() for b in self.model.buffers()]
        try:
            yield
        finally:
            for p in self.model.parameters():
                p.grad = None
            for own, before in zip(self.model.buffers(), buffers, strict=True):
                own.copy_(before)
            torch.cuda.set_rng_state(random, device)

    def _fits(self, leaves: list[Any], form: Any) -> bool:
        """Is the batch like the recorded one, and are the weights where they were?"""
        alike = form == self._form and all(map(_alike, leaves, self._inputs))
        places = [p.data_ptr() for p in self.model.parameters()]
        return alike and places == self._places

    def _replay(self, leaves: list[Any]) -> None:
        assert self._graph is not None
        for own, x in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(x)
        self._graph.replay()
        for p, g in zip(self.model.parameters(), self._grads, strict=True):
            p.grad = g


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Inside, what this thread asks the device for is recorded. Other threads may go on, such as
    one that makes the next batches. If it fails, the stream from before is the present one again,
    which torch 2.11 leaves undone."""
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        yield


def _reason(error: Exception) -> str:
    """The first error: the end of a recording that has failed raises another one."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return first_line(error)


def _alike(x: Any, own: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(own, Tensor):
        return x.shape == own.shape and x.dtype == own.dtype and x.device == own.device
    return type(x) is type(own) and bool(x == own)


def _close(found: list[Tensor | None], want: list[Tensor | None]) -> bool:
    """Equal but for the order in which a kernel adds."""
    for a, b in zip(found, want, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not float((a - b).norm()) <= 0.01 * float(b.norm()) + 1e-12:  # nor is nan
            return False
    return True
