"""A DistributedDataParallel over all workers: it averages in the warm-up, and not afterwards.

Two things keep it from averaging. Its two flags, which torch's own `no_sync()` uses, skip the whole
exchange. A communication hook of ours leaves each gradient as it is if somebody sets a flag again,
as training loops with gradient accumulation do. The hook alone would not be enough: broadcasts of
buffers and of the map of unused parameters do not pass through it, and hang if workers compute
different numbers of gradients.
"""

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def gradient_bytes(grad: Tensor | None) -> int:
    """What DistributedDataParallel sends of a gradient: of a sparse one, places and values."""
    if grad is None:
        return 0
    return grad._indices().nbytes + grad._values().nbytes if grad.is_sparse else grad.nbytes


class HookState:
    """What the hook of one DistributedDataParallel must know."""

    def __init__(self, model: DistributedDataParallel):
        self._model = weakref.ref(model)  # the model has the hook, so this would be a cycle
        self.averages = True
        self.bytes = 0  # handed over since somebody last asked

    def belongs_to(self, model: DistributedDataParallel) -> bool:
        return self._model() is model

    def mean(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket by the operations of a DistributedDataParallel without hook, in their
        order."""
        model = self._model()
        assert model is not None
        workers = dist.get_world_size(model.process_group)
        if workers > 1:
            self.bytes += gradient_bytes(buffer)
        buffer = buffer.div_(workers) if model.gradient_as_bucket_view else buffer.mul_(1 / workers)
        work = dist.all_reduce(buffer, group=model.process_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def __reduce__(self) -> Any:
        # A copy of the model has no hook yet.
        return _of_no_model, ()


def _of_no_model() -> HookState:
    state = HookState.__new__(HookState)
    state._model = lambda: None  # type: ignore[assignment, method-assign]
    return state


def average_or_keep(
    state: HookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: the mean over the workers in the warm-up, afterwards the gradient of
    this worker."""
    if state.averages:
        return state.mean(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Wrapped:
    """For a DistributedDataParallel, which averages the gradients during backward."""

    in_step = False

    def __init__(self, model: DistributedDataParallel):
        if getattr(model, "_delay_all_reduce_params", None):
            raise ValueError(
                "DistributedDataParallel(delay_all_reduce_named_params=...) averages these "
                "parameters at every step, whatever its flags say; leave that argument out"
            )
        self.model = model
        self._hook = _hook_of(model)  # None: there is another hook
        self._learning = False  # are the flags on for the first pass through a static graph?
        self._warned = False

    def switch(self, *, on: bool) -> None:
        if self._hook is not None:
            self._hook.averages = on
        self._learning = not on and self._graph_is_unknown
        if not self._learning:
            self._set_flags(on)
        elif self._hook is None:
            raise ValueError(
                "DistributedDataParallel(static_graph=True) must average in its first backward "
                "pass, as it has a communication hook of your own; use warmup_steps=1"
            )

    def _set_flags(self, on: bool) -> None:
        # DDP.no_sync() sets the first flag for a with block; here it stays set. The second flag
        # stops the broadcast of buffers in the next forward.
        self.model.require_backward_grad_sync = on
        self.model.require_forward_param_sync = on

    @property
    def _graph_is_unknown(self) -> bool:
        """Must the flags stay on once more? In a static graph torch learns in the first backward
        pass which parameters are used, and fails if the flags are off. Our hook keeps the gradients
        of that pass local, and every worker has one first pass."""
        model = self.model
        return model.static_graph and not model._static_graph_delay_allreduce_enqueued

    @property
    def on(self) -> bool:
        """Is a flag on?"""
        model = self.model
        return model.require_backward_grad_sync or model.require_forward_param_sync

    def keep_local(self) -> None:
        """Switch off the flags that are on after the warm-up. Warn if our hook has kept the
        gradient local, raise if something was exchanged."""
        if self._learning:
            self._learning = self._graph_is_unknown
            self._set_flags(self._learning)
            return
        exchanged = self._exchanged()
        if exchanged is not None:
            raise RuntimeError(
                "require_backward_grad_sync of the DistributedDataParallel was set to True after "
                f"the warm-up, and {exchanged}, or do not set that flag: the optimizer has set it "
                "to False"
            )
        if not self._warned:
            warnings.warn(
                "require_backward_grad_sync of the DistributedDataParallel was set to True after "
                "the warm-up. A communication hook has kept the gradients local, and the flag is "
                "set to False at every step; leave the flag to the optimizer",
                stacklevel=2,
            )
            self._warned = True
        self._set_flags(False)

    def _exchanged(self) -> str | None:
        """What a backward pass exchanges beside our hook, and how it would not."""
        model = self.model
        if self._hook is None:
            return (
                "a communication hook of your own averages the gradients; build the optimizer, or "
                "call attach(), before any hook is registered"
            )
        if model.broadcast_buffers and model.modules_buffers:
            name = "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else None
            return f"buffers are broadcast; pass {name or 'broadcast_buffers'}=False to it"
        if model.find_unused_parameters and not model.static_graph:
            return "unused parameters are exchanged; pass find_unused_parameters=False to it"
        return None

    def averaged_bytes(self, grads: list[Tensor | None]) -> int:
        """The bytes that were handed over to be averaged since the last call. Without our hook they
        are those of one backward pass."""
        if self._hook is None:
            return sum(map(gradient_bytes, grads))
        found, self._hook.bytes = self._hook.bytes, 0
        return found

    def broadcast_bytes(self) -> int:
        """The bytes of the buffers that worker 0 sends to all others in a forward pass."""
        model = self.model
        return sum(b.nbytes for b in model.modules_buffers) if model.broadcast_buffers else 0


def _hook_of(model: DistributedDataParallel) -> HookState | None:
    """Our hook on this model, registered if need be; None if there is another one."""
    hooks = model._comm_hooks
    for entry in list(hooks):
        state = entry[1]
        if isinstance(state, HookState):
            if state.belongs_to(model):
                return state
            hooks.remove(entry)  # the model is a copy of one that had our hook
    if hooks or model._use_python_reducer:
        return None
    mine = HookState(model)
    try:
        model.register_comm_hook(mine, average_or_keep)
    except RuntimeError:  # one of torch's built-in hooks
        hooks.pop()
        return None
    return mine
