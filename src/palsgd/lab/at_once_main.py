"""What each of several simulating processes does: `python -m palsgd.lab.at_once_main SHARE`.

SHARE is a file with runs. It is there when a line comes in, and is deleted when they are simulated.
"""

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from palsgd.lab import child_process

if TYPE_CHECKING:
    from palsgd.lab.at_once import Share

KEPT = 4  # data of so many seeds and splits are kept for the next share


def _work(path: Path) -> None:
    from palsgd.lab.at_once import Share
    from palsgd.lab.run_set import simulate
    from palsgd.lab.workloads import load

    loaded = functools.lru_cache(maxsize=KEPT)(load)
    for number, _ in enumerate(_lines()):
        share, sys.argv = Share.read(path)
        if number == 0:
            _take_no_more_than_a_share(share)
        simulate(share, loaded)
        path.unlink()


def _lines() -> TextIO:
    """What the parent writes. Others who read the input of this process find it empty: a workload
    that asks something would wait for ever, and take the lines."""
    lines = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return lines


def _take_no_more_than_a_share(share: "Share") -> None:
    """Of the machine, whose other parts are for the other processes."""
    import torch

    from palsgd.lab.at_once import MEMORY
    from palsgd.lab.device import chosen_device

    torch.set_num_threads(share.threads)
    if chosen_device(share.device).type == "cuda":
        allowed = min(MEMORY, torch.cuda.get_per_process_memory_fraction())
        torch.cuda.set_per_process_memory_fraction(allowed / share.processes)


if __name__ == "__main__":
    child_process.run(_work, rank="0")
