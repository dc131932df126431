"""The choice of a device, its name in words, and waiting for it."""

import os
from pathlib import Path

import torch

from palsgd.checks import check_choice
from palsgd.process_groups import device_in_turn

DEVICES = ("auto", "cpu", "cuda")


def check_device(device: str) -> None:
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but no GPU is to be seen here; use --device cpu")


def chosen_device(wanted: str) -> torch.device:
    """The device of a process that runs all workers; "auto" is a GPU if there is one."""
    check_device(wanted)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def worker_device(wanted: str, worker: int) -> torch.device:
    """The device of one of several workers on a machine. Workers take the GPUs in turn, if there
    are any."""
    return torch.device("cpu") if wanted == "cpu" else device_in_turn(worker)


def device_words(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def processor() -> str:
    """The CPU, in words."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'CPU'}, {os.cpu_count()} cores"


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that the time of that work can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
