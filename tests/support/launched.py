"""Worker processes as accelerate and Trainer expect them: with the variables that torchrun sets."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def launched() -> Iterator[None]:
    """Inside, this process of a world is one that torchrun has started. Frameworks may warn of
    matters of their own; what palsgd says is an error."""
    from accelerate.state import AcceleratorState, GradientState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
