"""Checkpoints in the format of torch.distributed.checkpoint: one folder per worker, whether the
worker is sharded or not."""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palsgd.optimizer import LocalOptimizer
from palsgd.replica import unwrapped
from palsgd.sharding import is_sharded


class Slot(NamedTuple):
    """Stands for a tensor in a saved state, and says what to allocate to read the tensor back."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Any  # of a sharded tensor; None for a plain one


def save(folder: str | Path, model: nn.Module, opt: LocalOptimizer) -> None:
    """Write this worker's model and optimizer; every rank calls it with the same folder.

    Each worker has a folder of its own, as the models of the workers differ between syncs, although
    their mesh calls the tensors replicas. The ranks of a worker write their shards into its folder.

    Raises:
        RuntimeError: `opt.may_save` is False, so states that the workers save now could not be
            loaded together.
    """
    # Workers that save right after a sync, each when it gets there, have the same syncs behind
    # them.
    if not (opt.may_save or opt.synced):
        raise RuntimeError(
            f"worker {opt.transport.worker} cannot save at clock {opt.clock}: after "
            f"{opt.gradient_steps} gradient steps some workers are before a sync and others behind "
            "it; save after an iteration at which opt.may_save is True"
        )
    tensors: dict[str, Tensor] = {}
    import torch.distributed.checkpoint as dcp  # takes seconds

    with _quiet(), opt.training_state():
        contents = {"model": unwrapped(model).state_dict(), "optimizer": opt.state_dict()}
        # bytes are one leaf, which dcp does not flatten
        skeleton = pickle.dumps(_take_out(contents, "", tensors))
        dcp.save(
            tensors | {_skeleton_key(opt): skeleton},
            checkpoint_id=_place(folder, opt),
            **_ranks(opt),
        )


def load(folder: str | Path, model: nn.Module, opt: LocalOptimizer, *, strict: bool = True) -> None:
    """Read what `save` wrote into a freshly built model and optimizer, in place."""
    place = _place(folder, opt)
    if not (place / ".metadata").exists():
        raise ValueError(
            f"no checkpoint of worker {opt.transport.worker} at {place}; give the folder that "
            "palsgd.checkpoint.save wrote, on a disk this worker can read"
        )
    import torch.distributed.checkpoint as dcp  # takes seconds

    key = _skeleton_key(opt)
    found: dict[str, Any] = {key: None}
    tensors: dict[str, Tensor] = {}
    with _quiet():
        dcp.load(found, checkpoint_id=place, **_ranks(opt))
        skeleton = pickle.loads(found[key])
        contents = _put_back(skeleton, _mesh(opt), opt._worker.inner.replica.device, tensors)
        dcp.load(tensors, checkpoint_id=place, **_ranks(opt))
    unwrapped(model).load_state_dict(contents["model"])
    opt.load_state_dict(contents["optimizer"], strict=strict)


def _take_out(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with a Slot in place of each tensor, which goes into `tensors`."""
    if isinstance(value, Tensor):
        tensors[key] = value
        placements = tuple(value.placements) if is_sharded(value) else None
        return Slot(key, tuple(value.shape), value.dtype, placements)
    if isinstance(value, dict):
        return {k: _take_out(v, f"{key}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_take_out(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]
    return value


def _put_back(value: Any, mesh: Any, device: torch.device, tensors: dict[str, Tensor]) -> Any:
    """`value` with an empty tensor in place of each Slot, kept in `tensors` to be read into."""
    if isinstance(value, Slot):
        if value.placements is None:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        else:
            from torch.distributed.tensor import empty

            tensor = empty(
                value.shape, dtype=value.dtype, device_mesh=mesh, placements=value.placements
            )
        tensors[value.key] = tensor
        return tensor
    if isinstance(value, dict):
        return {k: _put_back(v, mesh, device, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_put_back(v, mesh, device, tensors) for v in value]
    return value


def _place(folder: str | Path, opt: LocalOptimizer) -> Path:
    return Path(folder) / f"worker-{opt.transport.worker}"


def _mesh(opt: LocalOptimizer) -> Any:
    return next((p.device_mesh for p in opt._worker.inner.replica.params if is_sharded(p)), None)


def _skeleton_key(opt: LocalOptimizer) -> str:
    """Each rank of a worker has its own skeleton, as each rank has its own ledger."""
    return f"skeleton-{opt.transport.rank_inside}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings that a worker of one rank saves alone and that a checkpoint is
    overwritten. Both are intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _ranks(opt: LocalOptimizer) -> dict[str, Any]:
    """The processes that write one folder: the ranks of this worker, or this process alone."""
    inside = opt.transport.inside
    return {"no_dist": True} if inside is None else {"process_group": inside}
