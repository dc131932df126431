"""Faults of `palsgd train` with the processes that it starts itself, and starts again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults import lab_run
from faults.damage import newest, step_of
from faults.fault import Fault
from support.patience import patient

_LIMIT_S = 90.0
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


def launched(fault: Fault, place: Path, wanted: str) -> tuple[str, float, int, str]:
    """Kill a rank when the run has saved: it starts its workers again by itself. A rank that was
    asked to leave takes all with it, and the run is resumed by hand."""
    folder = place / "run"
    process, struck = _started(folder, "--restarts", "2"), time.monotonic()
    try:
        remark = _strike(process, folder, fault)
        struck = time.monotonic()
        said = process.communicate(timeout=patient(_LIMIT_S))[1]
    except subprocess.TimeoutExpired:
        return "hang", time.monotonic() - struck, 0, "the launcher did not end"
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - struck
    if "Traceback" in said:
        return "unclean error", seconds, 0, said[-600:]
    if process.returncode == 0:
        right = lab_run.digest(folder) == wanted
        return ("survived" if right else "wrong weights"), seconds, 0, remark
    if fault.kind == "kill" or process.returncode != 143:
        return "stopped", seconds, 0, f"exit code {process.returncode}: {said[-600:]}"
    again = _started(folder, "--resume")
    said = again.communicate(timeout=patient(_LIMIT_S))[1]
    right = again.returncode == 0 and lab_run.digest(folder) == wanted
    return ("clean error" if right else "wrong weights"), seconds, 0, remark if right else said


def _started(folder: Path, *flags: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(each for each in sys.path if each)
    return subprocess.Popen(
        [sys.executable, "-m", "palsgd", *lab_run.WORDS, "--out", str(folder), *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def _strike(process: subprocess.Popen[str], folder: Path, fault: Fault) -> str:
    """Send the signal to a rank when so many saves are there that the step has been reached."""
    deadline = time.monotonic() + patient(_LIMIT_S)
    while process.poll() is None and time.monotonic() < deadline:
        saves, ranks = newest(lab_run.saves(folder)), _children(process.pid)
        reached = saves and step_of(saves[0]) >= fault.step // 2
        if reached and len(ranks) == 2:
            os.kill(ranks[fault.victim], _SIGNALS[fault.kind])
            return f"at {saves[0].name}"
        time.sleep(0.002)
    return "the run was over before"


def _children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    try:
        return sorted(int(pid) for pid in path.read_text().split())
    except OSError:
        return []
