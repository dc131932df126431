"""What each of several simulating processes does: `python -m palsgd.lab.at_once_main SHARE`.

SHARE is a file with the runs. A process that fails says why in a file beside it.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from palsgd import interrupts

if TYPE_CHECKING:
    from palsgd.lab.at_once import Share


def main() -> NoReturn:
    """End without Python's tidying up, which may wait for threads that make batches."""
    interrupts.leave_to_parent()  # first, as imports take seconds
    code = _work(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(path: Path) -> int:
    from palsgd.lab.order import Failure

    try:
        from palsgd.lab.at_once import Share
        from palsgd.lab.run_set import simulate

        share, sys.argv = Share.read(path)
        _take_no_more_than_a_share(share)
        simulate(share)
    except BaseException as error:
        Failure.of(error).write(path.parent, 0)
        return 1
    return 0


def _take_no_more_than_a_share(share: "Share") -> None:
    """Of the machine, whose other parts are for the other processes."""
    import torch

    from palsgd.lab.at_once import MEMORY
    from palsgd.lab.device import chosen_device

    torch.set_num_threads(share.threads)
    if chosen_device(share.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY / share.processes)


if __name__ == "__main__":
    main()
