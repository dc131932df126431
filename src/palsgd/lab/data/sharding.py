"""Which examples are in which batch: a pure function of seed, worker and index."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def batch_indices(
    *,
    seed: int,
    worker: int,
    workers: int,
    size: int,
    index: int,
    examples: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The examples in the `index`-th batch of a worker.

    An epoch is one permutation for all workers, dealt out in batches: worker 0 takes the first,
    worker 1 the second, and so on in turn. Examples that do not fill a batch for every worker are
    left out. The next epoch has another permutation and leaves out others.
    """
    rounds = examples // (workers * size)
    if rounds == 0:
        raise ValueError(
            f"{examples} examples give each of {workers} workers {examples // workers}, fewer than "
            f"a batch of {size}; use a smaller batch, fewer workers or more data"
        )
    epoch, place = divmod(index, rounds)
    start = (place * workers + worker) * size
    return _permutation(seed, epoch, examples, str(device))[start : start + size]


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Random numbers that are a function of seed and key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


# Two permutations for each seed that trains at the same time are enough, as simulated workers are
# at most one epoch apart.
@lru_cache(maxsize=32)
def _permutation(seed: int, epoch: int, examples: int, device: str) -> Tensor:
    return torch.from_numpy(random_stream(seed, epoch).permutation(examples)).to(device)
