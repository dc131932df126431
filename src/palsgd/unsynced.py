"""Warns of runs that are dropped, or end with the program, before their last steps are synced."""

import atexit
import os
import sys
import warnings
from typing import Any
from weakref import WeakSet

_watched: "WeakSet[Any]" = WeakSet()  # optimizers, which are asked when the program ends


class Unsynced:
    """Watches an optimizer that has other workers. It does not refer to the optimizer, which could
    not be dropped otherwise."""

    def __init__(self, opt: Any):
        self.quiet = False  # True once it has warned, or after a step that failed
        self.saved_at = -1  # the clock of the last saved state, from which a run may go on
        self._process = os.getpid()  # a fork, such as a loader's, has a copy of the optimizer
        _watched.add(opt)

    def warn(self, opt: Any) -> None:
        steps = 0 if self.quiet or os.getpid() != self._process else opt.unsynced_steps
        if steps and opt.clock != self.saved_at:
            self.quiet = True
            last = "last step" if steps == 1 else f"last {steps} steps"
            warnings.warn(
                f"the {last} of worker {opt.transport.worker} {'was' if steps == 1 else 'were'} "
                "not synced, so the workers hold different models; call opt.finish() after the "
                "loop, or use palsgd.until()",
                stacklevel=3,
            )


@atexit.register
def _at_exit() -> None:
    if hasattr(sys, "last_value"):  # the program ends with an error, which says more
        return
    for opt in list(_watched):
        opt._unsynced.warn(opt)
