"""What is common to processes that a command starts and waits for: `python -m MODULE FILE`.

FILE says what to do. A process that fails says why in a file beside it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from palsgd import interrupts


def run(work: Callable[[Path], int | None], rank: str) -> NoReturn:
    """Do the work, which may return an exit code, and end without Python's tidying up, which may
    wait for threads of a broken exchange or for those that make batches."""
    interrupts.leave_to_parent()  # first, as imports take seconds
    path = Path(sys.argv[1])
    try:
        code = work(path) or 0
    except BaseException as error:
        from palsgd.lab.order import Failure

        Failure.of(error).write(path.parent, rank)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
