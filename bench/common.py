"""What the benchmarks share: GPT-Neo's tensors, clocks, and the records that they write.

Every record says where its figures come from: `provenance` gives the commit, whether the files
differed from it, the command line, the machine and torch's version. Under "untimed" a record keeps
figures that no clock was needed for (counts, bytes, losses). A test runs every script with --tiny
and compares those figures, so that a script which no longer runs, or which no longer measures what
it says, is noticed without a measurement.
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from palsgd.lab.provenance import checkout, without_folders

REPOSITORY = Path(__file__).resolve().parent.parent
SIZES = {  # positions, hidden size, layers, words
    "tiny": (8, 8, 1, 64),  # for --tiny
    "gpt-neo-8m": (300, 128, 8, 50257),  # the paper's smaller model
    "gpt-neo-33m": (300, 380, 8, 50257),  # four times that, and still one bucket of 128 MiB
    "gpt-neo-125m": (1024, 768, 12, 50257),  # the paper's larger model
}


def gpt_neo_tensors(name: str, device: str) -> nn.ParameterList:
    """Random tensors in the shapes of a GPT-Neo model's parameters, its tied head once."""
    positions, d, layers, words = SIZES[name]
    shapes: list[tuple[int, ...]] = [(words, d), (positions, d)]
    for _ in range(layers):
        shapes += [(d,), (d,), (d, d), (d, d), (d, d), (d, d), (d,)]  # norm, k, v, q, out
        shapes += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]  # norm, two linears
    shapes += [(d,), (d,)]
    return nn.ParameterList(torch.randn(shape, device=device) * 0.02 for shape in shapes)


def in_two_processes(
    work: Callable[..., None], folder: str | Path, *given: Any, start: str = "fork"
) -> list[Any]:
    """What `work(pipe, rank, folder, *given)` sends from each of two processes."""
    context = multiprocessing.get_context(start)
    pipes, children = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        children.append(context.Process(target=work, args=(theirs, rank, folder, *given)))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join(timeout=60)
    return found


def join_the_other(rank: int, folder: str | Path) -> None:
    """In one of the two processes: over gloo, by a file in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(minutes=5),
    )  # fmt: skip


def with_gradients(name: str, device: str, *, rank: int) -> nn.ParameterList:
    """The same tensors in all processes, with gradients of each rank's own."""
    torch.manual_seed(0)
    model = gpt_neo_tensors(name, device)
    torch.manual_seed(1 + rank)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    return model


def mixing_step() -> Callable[[list[torch.Tensor], list[torch.Tensor], float], None]:
    """One mixing step, for which palsgd has no public name: `step()` takes a gradient step as well.
    Imported when asked for, as bench/exogym.py's other side must not pay for importing palsgd."""
    try:
        from palsgd.tensors import mix_
    except ImportError:  # a commit before it moved, which bench/against.py may measure
        from palsgd.replica import mix_  # type: ignore[attr-defined,no-redef]

    return mix_


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


# -- records ---------------------------------------------------------------------------------------


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """What every script takes."""
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to see it run")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")


def provenance(device: str, *, tiny: bool) -> dict[str, Any]:
    """The head of every record: by which code, by which command and where it was made."""
    return {**_code(), "command": command_line(), "tiny": tiny, "machine": machine(device)}


@functools.cache  # at the start of a run: the record itself, once written, is a change as well
def _code() -> dict[str, Any]:
    """The commit, and whether the tracked files differ from it."""
    commit, dirty = checkout(REPOSITORY)
    return {"commit": commit or "unknown", "dirty": dirty}


def command_line() -> str:
    """This program's, as one would type it in the repository: a record names no folder of the
    machine it was made on, as that tells its reader nothing."""
    return shlex.join(["python", *(without_folders(word, REPOSITORY) for word in sys.argv)])


def save(record: dict[str, Any], out: Path | None) -> None:
    """Write a record, if it is wanted. Scripts call it after each row, so that what is done is
    kept when a long run is stopped."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def absent(packages: Iterable[str]) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def summary(record: dict[str, Any]) -> str:
    """The last line a script prints: its untimed figures, and which peers did not take part."""
    figures = "; ".join(f"{name} {value}" for name, value in record["untimed"].items())
    missing = record.get("not_installed")
    return f"untimed: {figures}" + (f"; not installed: {', '.join(missing)}" if missing else "")


def machine(device: str) -> dict[str, Any]:
    """`device` is what the figures are of; CPU and GPU are named whichever of them that is."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu if device == "cuda" else _cpu_name(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "load": os.getloadavg()[0],
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
