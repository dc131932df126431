"""The global model alone, as a file that needs no palsgd to be read."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from palsgd import tensor_files
from palsgd.checkpoint.step_folders import make
from palsgd.disk import force
from palsgd.optimizer import LocalOptimizer
from palsgd.replica import unwrapped
from palsgd.sharding import is_sharded
from palsgd.tensor_files import SUFFIX
from palsgd.transports.waiting import waiting_for


@torch.no_grad()
def save_model(folder: str | Path, opt: LocalOptimizer) -> Path:
    """Write the global model alone, as `model.safetensors`, which needs no palsgd to be read.

    Every worker that calls this writes the file, on its own disk or over an equal one. For a method
    whose workers have no common anchor the global model takes a message, so all workers must call
    this; all ranks of a worker must always.

    Args:
        folder: where the file lies.
        opt: the palsgd optimizer.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be written.
        SyncError: a worker is lost that has a part of the model.

    Example:
        >>> import tempfile, torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> palsgd.checkpoint.save_model(tempfile.mkdtemp(), opt).name
        'model.safetensors'
    """
    path = Path(folder) / f"model{SUFFIX}"
    with opt.anchor_weights():
        state = unwrapped(opt.model).state_dict()
        inside = opt.transport.inside if opt.transport.sharded else None
        with nullcontext() if inside is None else waiting_for(inside, "in save_model()"):
            whole = {name: _whole(tensor) for name, tensor in state.items()}
        if opt.transport.rank_inside == 0:
            _write_model(path, whole, {"format": "pt", "clock": str(opt.clock)})
    return path


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _write_model(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    make(path.parent)
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    try:
        tensor_files.write(part, tensors, texts)
        os.replace(part, path)
        force(path.parent)
    finally:
        part.unlink(missing_ok=True)
