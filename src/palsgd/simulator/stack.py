"""The tensors of many workers, stacked along a first axis, and the programs that run on them.

Workers are numbered over all runs: worker k of run r is number r K + k. As long as all workers of a
run are equal (warm-up, DDP) a run has a single row of weights and inner state, which its workers
share; from `split` on, each worker has its own. Gradients are those of the sum of all losses. The
loss of a worker depends on that worker's row only, so each row gets its own gradient. A shared row
gets the sum over its workers.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from palsgd.simulator.batches import moved, sent
from palsgd.simulator.graphed import Gradient, GraphedGradient, Graphs
from palsgd.simulator.saved import copy_tensors
from palsgd.simulator.stacked_convolutions import unfold_convolutions, ways
from palsgd.simulator.stacked_optimizers import StackedAdam, StackedSGD
from palsgd.simulator.stacking_checks import (
    CannotVectorizeError,
    UnequalBatchesError,
    first_line,
    plain_attributes,
    stacked_batch,
)

log = logging.getLogger("palsgd")

Gradients = tuple[list[Tensor], Tensor]  # one per parameter, and the losses of the workers
MOST_ROUNDING = 0.3  # of a gradient's norm; what is further away is another gradient
LOW = (torch.bfloat16, torch.float16)


class Precisions(TorchDispatchMode):
    """Inside, `low` is filled with the low precisions that are computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.low: set[torch.dtype] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call(*args, **(kwargs or {}))
        given = (x for x in pytree.tree_leaves(found) if isinstance(x, Tensor))
        self.low |= {x.dtype for x in given if x.dtype in LOW}
        return found


class StackedWorkers:
    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        rows: list[list[Tensor]],
        buffers: dict[str, list[Tensor]],
        workers: int,
        inner: StackedSGD | StackedAdam,
        group_of: list[int],
    ):
        """`names` are the trained parameters in `module`, `rows` their values in each run;
        `buffers` likewise by name. Everything else in the module is the same for all workers."""
        self.runs, self.workers, self.count = len(rows), workers, len(rows) * workers
        self._module, self._names, self._inner = module, names, inner
        self.params = [
            torch.stack([x.detach() for x in each]).contiguous() for each in zip(*rows, strict=True)
        ]
        self.state = [
            inner.new_state(x, group) for x, group in zip(self.params, group_of, strict=True)
        ]
        self.buffers = {
            name: torch.stack(values).repeat_interleave(workers, dim=0)
            for name, values in buffers.items()
        }
        varied = {*names, *buffers}
        everything = [*module.named_parameters(), *module.named_buffers()]
        self._constant = {name: x.detach() for name, x in everything if name not in varied}
        self._columns: dict[tuple[float, ...], Tensor] = {}
        self.unfold(0)
        self.compile(False)

    @property
    def shared(self) -> bool:
        return len(self.params[0]) != self.count

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def split(self) -> None:
        """Give each worker weights and inner state of its own."""
        if self.shared:
            self.params = [x.repeat_interleave(self.workers, dim=0) for x in self.params]
            self.state = [
                [s.repeat_interleave(self.workers, dim=0) for s in kept] for kept in self.state
            ]

    def tensors(self) -> dict[str, Any]:
        """Everything that differs between workers, not copied."""
        return {"params": self.params, "state": self.state, "buffers": self.buffers}

    def load(self, saved: dict[str, Any]) -> None:
        mine, theirs = (_named(each) for each in (self.tensors(), saved))
        copy_tensors(theirs, mine)

    def compile(self, compiled: bool | str, *, shared: bool = True, own: bool = True) -> None:
        """Compile the programs that always run on all workers: that of rows that are `shared` and
        that of each worker's `own` row. A program for another number of workers would be compiled
        again. A string is torch.compile's mode."""
        self.compiled = {"shared": bool(compiled) and shared, "own": bool(compiled) and own}
        mode = compiled if isinstance(compiled, str) else None
        # Not for any number of workers: vmap cannot compute a convolution without knowing it.
        build = partial(torch.compile, mode=mode, dynamic=False)
        self._some = vmap(self._loss_of, randomness="different")
        one_run = vmap(self._loss_of, in_dims=(None, 0, 0), randomness="different")
        self._plain = {"shared": vmap(one_run, randomness="different"), "own": self._some}
        self._programs = {
            rows: build(self._plain[rows]) if wanted else self._plain[rows]
            for rows, wanted in self.compiled.items()
        }
        self._untried = {rows for rows, wanted in self.compiled.items() if wanted}

    def _loss_of(self, trained: list[Tensor], held: dict[str, Tensor], batch: Any) -> Tensor:
        weights = dict(zip(self._names, trained, strict=True))
        loss = functional_call(self._module, (weights, held, self._constant), (batch,))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the loss is not one number")
        return loss.reshape(())

    # -- gradients -------------------------------------------------------------------------------

    def gradients(self, who: list[int], batches: list[Any]) -> Gradients:
        """The gradients, with one row per worker in `who`, and the losses of these workers. If rows
        are shared, `who` has all workers, and a row is the mean over the workers of a run."""
        try:
            batch = stacked_batch(batches)
        except UnequalBatchesError:  # such as the last batches of an epoch
            return self._one_by_one(who, batches)
        return self.gradients_of(who, batch)

    def gradients_of(self, who: list[int], batch: Any) -> Gradients:
        """The same for batches that are stacked already. Kernels of stacked workers expect the
        usual order in memory, whichever that of a batch is."""
        batch = pytree.tree_map_only(Tensor, Tensor.contiguous, moved(batch, self.device))
        if self.shared:
            grads, losses = self._of_all(
                "shared", self.params, self._by_run(self.buffers), self._by_run(batch)
            )
            return list(torch._foreach_div(grads, self.workers)), losses
        if len(who) == self.count:
            return self._of_all("own", self.params, self.buffers, batch)
        held = {name: b[who] for name, b in self.buffers.items()}
        found = self._differentiate(self._some, [x[who] for x in self.params], held, batch)
        for name, part in held.items():
            self.buffers[name][who] = part
        return found

    def one_gradient(self, worker: int, batch: Any) -> Gradients:
        row = worker // self.workers if self.shared else worker
        params = [x[row : row + 1] for x in self.params]
        held = {name: b[worker : worker + 1] for name, b in self.buffers.items()}
        return self._differentiate(
            self._some, params, held, moved(stacked_batch([batch]), self.device)
        )

    def _one_by_one(self, who: list[int], batches: list[Any]) -> Gradients:
        found = [self.one_gradient(k, batch) for k, batch in zip(who, batches, strict=True)]
        grads = [torch.cat(parts) for parts in zip(*(g for g, _ in found), strict=True)]
        if self.shared:
            grads = [g.unflatten(0, (self.runs, self.workers)).mean(dim=1) for g in grads]
        return grads, torch.cat([loss for _, loss in found])

    def _of_all(
        self, rows: str, params: list[Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> Gradients:
        """A program that cannot be compiled, which is known when it first runs, runs as it is, with
        a warning: training goes on, only slower."""
        if rows in self._untried:
            self._untried.remove(rows)
            before = _clones(buffers)
            try:
                return self._differentiate(self._programs[rows], params, buffers, batch)
            except (RuntimeError, TypeError, AssertionError) as error:
                log.warning("palsgd.simulate: not compiled, because %s", first_line(error))
            self._programs[rows], self.compiled[rows] = self._plain[rows], False
            copy_tensors(before, buffers)
        return self._differentiate(self._programs[rows], params, buffers, batch)

    def _differentiate(
        self, program: Callable, params: list[Tensor], buffers: Any, batch: Any
    ) -> Gradients:
        with torch.enable_grad(), _batched_attention(self.device):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = [x.detach().requires_grad_() for x in params]
            losses = program(leaves, buffers, batch)
            grads = torch.autograd.grad(losses.sum(), leaves)
        return list(grads), losses.detach().flatten().clone()  # a CUDA graph reuses its memory

    def _by_run(self, tree: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda x: x.unflatten(0, (self.runs, self.workers)), tree
        )

    # -- trying ----------------------------------------------------------------------------------

    def try_gradient(self, batches: list[Any]) -> None:
        """Raise CannotVectorizeError if this model cannot be stacked; nothing changes."""
        try:
            with self._apart() as (pristine, buffers, constant):
                self.gradients(list(range(self.count)), batches)
                self._check_unchanged(pristine=pristine, constant=constant)
                self.buffers = _clones(buffers)
                self._compare_with_backward(batches[0], pristine=pristine)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise CannotVectorizeError(f"vmap says: {first_line(error)}") from error

    def try_compiled(self, batches: list[Any]) -> None:
        """Compile before training begins. The module is the one that trains, as for a copy of it
        torch would compile again."""
        before, self.buffers = self.buffers, _clones(self.buffers)
        try:
            self.gradients(list(range(self.count)), batches)
        finally:
            self.buffers = before

    @contextmanager
    def _apart(self) -> Iterator[tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]]:
        """Inside, gradients are computed on copies of what a forward pass may change. Yields the
        module, the buffers and the constants outside."""
        outside = self._module, self.buffers, self._constant
        self._module = copy.deepcopy(self._module)
        self._constant = {name: x.clone() for name, x in self._constant.items()}
        self.buffers = _clones(outside[1])
        try:
            yield outside
        finally:
            self._module, self.buffers, self._constant = outside

    def likeness(self, batches: list[Any]) -> tuple[Any, ...]:
        """Equal for stacks whose gradients take as long. What differs in a loss alone, such as its
        precision, it says itself in an attribute `likeness`."""
        tensors = [*self.params, *pytree.tree_leaves(batches[0])]
        shapes = str([(x.shape, x.dtype) for x in tensors if isinstance(x, Tensor)])
        products = str(getattr(torch.backends.cuda.matmul, "fp32_precision", None))
        how = self.count, self.shared, shapes, str(self.device), products
        return str(self._module), self._module.likeness, *how

    def choose_convolutions(self, batches: list[Any]) -> float:
        """Time a gradient of all workers, with each way to compute convolutions, and keep the
        faster one. Returns its seconds."""
        taken = {}
        for channels in ways(self._module):
            with self._apart():
                unfold_convolutions(self._module, channels)
                taken[channels] = self._seconds_of(self.gradients, list(range(self.count)), batches)
        self.unfold(min(taken, key=lambda way: taken[way]))
        return min(taken.values())

    def unfold(self, channels: int) -> None:
        """Compute convolutions of at most so many channels from patches."""
        self.unfolded = channels  # 0: none
        unfold_convolutions(self._module, channels)

    def loop_seconds(self, batches: list[Any], graphs: bool) -> float:
        """The seconds of the same gradients, one worker after another, as CUDA graphs or not."""
        module, batch = copy.deepcopy(self._module), moved(batches[0], self.device)
        unfold_convolutions(module, 0)
        kind = partial(GraphedGradient, graphs=Graphs()) if graphs else Gradient
        gradient = kind(module, lambda own, given: own(given))

        def one() -> None:
            module.zero_grad()
            with torch.enable_grad():
                gradient(batch)

        return self.count * self._seconds_of(one)

    def _seconds_of(self, call: Callable[..., Any], *args: Any) -> float:
        """The least of a few times, after two that choose algorithms; infinite if memory is
        short."""
        found = []
        try:
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call(*args)
                torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf
        return min(found[2:])

    def _compare_with_backward(self, batch: Any, pristine: nn.Module) -> None:
        """Refuse a model whose stacked gradients differ from those of backward(). Reasons are a
        parameter that is not used (its gradient is None, not zero), a parameter that the module
        reaches by another attribute, and a buffer that the module replaces instead of changing
        it."""
        (first, left), (second, _) = (self._plain_gradients(batch, pristine) for _ in range(2))
        grads, _ = self.one_gradient(0, batch)
        if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            return  # with dropout the gradients are random, so they cannot be compared
        norms = [float(a.norm()) for a in first]
        distances = [float((a - g[0]).norm()) for a, g in zip(first, grads, strict=True)]
        # A difference far below the largest norm is rounding.
        apart = [i for i, distance in enumerate(distances)
                 if distance > 0.05 * norms[i] + 1e-4 * max(norms)]  # fmt: skip
        rounding = self._rounding(batch, pristine, first) if apart else []
        for i in apart:
            most = min(MOST_ROUNDING * norms[i], 3 * rounding[i])
            if not distances[i] <= most or math.isnan(rounding[i]):
                name = self._names[i]
                raise ValueError(f"the stacked gradient of {name} is not that of backward()")
        for name, own in self.buffers.items():
            a, b = own[0].double(), left[name].double()
            if not torch.allclose(a, b, rtol=0.01, atol=1e-4, equal_nan=True):
                raise ValueError(f"{name} is replaced by the forward pass, not changed in place")

    def _rounding(self, batch: Any, pristine: nn.Module, grads: list[Tensor]) -> list[float]:
        """How far rounding moves the gradients, by moving the weights as far as rounding to the low
        precision that is computed in does; zeros where none is. Where maxima are taken, rounding
        decides which of two places has the gradient."""
        nudged = copy.deepcopy(pristine)
        with Precisions() as seen:
            self._plain_gradients(batch, nudged)
        if not seen.low:
            return [0.0] * len(grads)
        generator = torch.Generator(self.device).manual_seed(0)
        eps = max(torch.finfo(dtype).eps for dtype in seen.low)
        with torch.no_grad():
            for p in (p for p in nudged.parameters() if p.is_floating_point()):
                up = torch.empty(p.shape, device=p.device).bernoulli_(generator=generator)
                # half a place is nothing to a weight that is kept in that precision
                size = eps if p.dtype in LOW else eps / 4
                p.mul_((1 + size * (2 * up - 1)).to(p.dtype))
        found, _ = self._plain_gradients(batch, nudged)
        return [float((a - b).norm()) for a, b in zip(grads, found, strict=True)]

    def _plain_gradients(
        self, batch: Any, pristine: nn.Module
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The gradients that backward() computes, and the buffers after it."""
        module = copy.deepcopy(pristine)
        with torch.enable_grad():
            module(moved(batch, self.device)).backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        missing = [name for name in self._names if found[name] is None]
        if missing:
            raise ValueError(f"{missing[0]} gets no gradient")
        return [found[name] for name in self._names], dict(module.named_buffers())  # type: ignore[misc]

    def _check_unchanged(self, pristine: nn.Module, constant: dict[str, Tensor]) -> None:
        """Refuse a forward pass that changes tensors or attributes that all workers share."""
        before, after = plain_attributes(pristine), plain_attributes(self._module)
        changed = [name for name in before if before[name] != after.get(name)]
        changed += [n for n, x in constant.items() if not torch.equal(x, self._constant[n])]
        if changed:
            raise ValueError(f"the forward pass changes {changed[0]}, which workers would share")

    # -- steps -----------------------------------------------------------------------------------

    def step(self, who: list[int], grads: list[Tensor], rates: list[list[float]]) -> None:
        """One inner step of the rows in `who`; `rates[g]` has their learning rates."""
        columns = [self._column(group) for group in rates]
        if len(who) == len(self.params[0]):
            compiled = self.compiled["shared" if self.shared else "own"]
            self._inner.step(self.params, grads, columns, self.state, compiled)
            return
        index = sent(torch.tensor(who), self.device)
        params = [x.index_select(0, index) for x in self.params]
        state = [[s.index_select(0, index) for s in kept] for kept in self.state]
        self._inner.step(params, grads, columns, state)
        for x, part in zip(self.params, params, strict=True):
            x.index_copy_(0, index, part)
        for kept, parts in zip(self.state, state, strict=True):
            for s, part in zip(kept, parts, strict=True):
                s.index_copy_(0, index, part)

    def _column(self, rates: list[float]) -> Tensor:
        """Learning rates as a tensor on the device. It is kept, as most rounds use the same few
        rates."""
        key = tuple(rates)
        if key not in self._columns:
            if len(self._columns) > 256:
                self._columns.clear()
            column = torch.tensor(rates, dtype=torch.float64)
            self._columns[key] = sent(column, self.device)
        return self._columns[key]

    def forget_nonfinite(self, worker: int) -> None:
        """Reset the inner state of each of the worker's parameters whose state holds inf or nan."""
        for kept in self.state:
            if not all(bool(s[worker].isfinite().all()) for s in kept):
                for s in kept:
                    s[worker] = 0

    def has_state(self, name: str) -> bool:
        """Has the inner optimizer a tensor of that name for every parameter?"""
        place = self._inner.place_of(name)
        return place is not None and all(len(kept) > place for kept in self.state)

    def state_named(self, name: str) -> list[Tensor]:
        place = self._inner.place_of(name)
        assert place is not None
        return [kept[place] for kept in self.state]


def _named(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a stack by names of their own."""
    found = {f"parameter {i}": x for i, x in enumerate(tensors["params"])}
    for i, kept in enumerate(tensors["state"]):
        found |= {f"state {n} of parameter {i}": x for n, x in enumerate(kept)}
    return found | tensors["buffers"]


def _clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def _batched_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Allow only the attention kernels that vmap supports: the one of matrix products and, on a
    GPU, flash attention. The gradient of memory-efficient attention fails under vmap, and cuDNN's
    attention cannot be compiled by torch 2.11."""
    fused = [SDPBackend.FLASH_ATTENTION] if device.type == "cuda" else []
    return sdpa_kernel([*fused, SDPBackend.MATH])
