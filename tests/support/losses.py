"""Ways in which a process is lost to the others, each done by the process itself."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall(seconds: float, *until: Path) -> None:
    """Stop this process, as a machine that swaps or a dead link would, for so many seconds, or
    until these files are there."""
    pid = os.getpid()
    there = " && ".join(f"[ -e {path} ]" for path in until) or "false"
    wait = f"for i in $(seq {round(10 * seconds)}); do {there} && break; sleep 0.1; done"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def lost_before(place: Any, name: str, count: int, stalled: float) -> None:
    """From now on the `count`-th call of a function is that of a process that is lost: killed, or
    stalled for so many seconds."""
    call, left = getattr(place, name), [count]

    def lost(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            stall(stalled) if stalled else kill()
        return call(*args, **kwargs)

    setattr(place, name, lost)
