"""What each worker process of the lab does: `python -m palsgd.lab.worker_main ORDER`.

ORDER is a file with the jobs.
"""

import os
import sys
from pathlib import Path

from palsgd.lab import child_process


def _work(path: Path) -> int | None:
    from palsgd.lab.launcher import LeftError, work
    from palsgd.lab.order import Order

    order, sys.argv = Order.read(path)
    # A namespace looks like a machine of its own; in truth the workers share this one.
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    try:
        work(order)
    except LeftError:
        from palsgd.leaving import EXIT_CODE

        return EXIT_CODE
    return None


if __name__ == "__main__":
    child_process.run(_work, os.environ["RANK"])
