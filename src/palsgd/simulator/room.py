"""How many workers and runs fit into memory."""

import gc
import os
from pathlib import Path

import torch
from torch import nn

SHARE = 4  # weights and state may take a quarter of the memory; the rest is for activations


def check_memory(model: nn.Module, workers: int) -> None:
    """Refuse a simulation that does not fit into memory."""
    need, free = memory(model, workers)
    if need > free:
        raise ValueError(
            f"{workers} workers need about {need / 2**30:.1f} GiB for weights, gradients and inner "
            f"state, activations not counted, and {free / 2**30:.1f} GiB are free on "
            f"{next(model.parameters()).device}; use at most {max(1, workers * free // need)} "
            "workers, or a smaller model"
        )


def runs_that_fit(model: nn.Module, workers: int) -> int:
    need, free = memory(model, workers)
    return max(1, free // max(1, SHARE * need))


def memory(model: nn.Module, workers: int) -> tuple[int, int]:
    """The bytes that a run needs for the weights, gradients and two tensors of inner state of each
    worker; and the bytes that are free."""
    device = next(model.parameters()).device
    need = workers * 4 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if device.type == "cuda":
        return need, _free_memory_of(device, SHARE * need)
    return need, _free_memory()


def _free_memory_of(device: torch.device, wanted: int) -> int:
    """Of a GPU, as far as this process may take it. Where less than `wanted` is free, programs that
    have ended are taken apart: their workers refer to each other in circles, and Python looks for
    those when there are many objects, not when they are large."""
    found = _free_now(device)
    if found < wanted:
        gc.collect()
        found = _free_now(device)
    return found


def _free_now(device: torch.device) -> int:
    """What torch keeps of programs that have ended is free for the next one."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    taken = torch.cuda.memory_allocated(device)
    kept = torch.cuda.memory_reserved(device) - taken
    return max(0, min(free + kept, allowed - taken))


def _free_memory() -> int:
    """The bytes that programs can allocate. On Linux they include the file cache."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if available:
        return available[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
