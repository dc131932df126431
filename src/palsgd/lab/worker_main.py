"""What each worker process of the lab does: `python -m palsgd.lab.worker_main ORDER`.

ORDER is a file with the jobs. A worker that fails says why in a file beside it.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from palsgd import interrupts


def main() -> NoReturn:
    """End without Python's tidying up, which may wait for threads of a broken exchange."""
    interrupts.leave_to_parent()
    code = _work(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(path: Path) -> int:
    from palsgd.lab.order import Failure

    try:
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
    except BaseException as error:
        Failure.of(error).write(path.parent, os.environ["RANK"])
        return 1
    return 0


if __name__ == "__main__":
    main()
