"""What the benchmarks share: GPT-Neo's tensors, clocks, the machine's name."""

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

SIZES = {  # the paper's two models: positions, hidden size, layers
    "gpt-neo-8m": (300, 128, 8),
    "gpt-neo-125m": (1024, 768, 12),
}


def gpt_neo_tensors(name: str, device: str) -> nn.ParameterList:
    """Random tensors in the shapes of a GPT-Neo model's parameters, its tied head once."""
    positions, d, layers = SIZES[name]
    shapes: list[tuple[int, ...]] = [(50257, d), (positions, d)]
    for _ in range(layers):
        shapes += [(d,), (d,), (d, d), (d, d), (d, d), (d, d), (d,)]  # norm, k, v, q, out
        shapes += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]  # norm, two linears
    shapes += [(d,), (d,)]
    return nn.ParameterList(torch.randn(shape, device=device) * 0.02 for shape in shapes)


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median of `repeats` calls, after a first one that is not counted."""
    call()
    return statistics.median(_timed(call, device) for _ in range(repeats))


def interleaved(
    calls: dict[str, Callable[[], object]], device: str, repeats: int
) -> dict[str, float]:
    """The medians of several calls taken in turn, so that a slow moment hits all alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_timed(call, device))
    return {name: statistics.median(found) for name, found in times.items()}


def _timed(call: Callable[[], object], device: str) -> float:
    settle(device)
    start = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - start


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(rows: list[tuple[str, str, str]]) -> str:
    """Markdown: what, figure, what it is a ratio of."""
    head = [("figure", "value", "over")]
    widths = [max(len(row[i]) for row in head + rows) for i in range(3)]
    lines = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in head + rows]
    rule = ["-" * w for w in widths]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [lines[0], rule, *lines[1:]])
