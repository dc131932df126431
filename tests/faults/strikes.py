"""How a fault strikes, inside the worker that it strikes.

The worker does it to itself, so that a fault comes at the same gradient step each time. What must
come from outside, such as waking up a stopped worker, is left to the process that started it.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from faults.fault import Fault
from faults.notes import Notes

_INSTANT_S = 0.03  # a kill comes within so many seconds after the step's beginning
_OPERATIONS = 14  # the file operations of a save, about
_BYTES = 8_000  # fewer than a file of a save has
_JUMP_S = 86_400.0
_REMOUNT, _READ_ONLY = 32, 1  # the kernel's MS_REMOUNT and MS_RDONLY
_FROM_THE_START = ("slow link", "lossy link")
_OPERATION_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")


class Strike:
    """The fault of one worker. `before(step)` is called at the start of a gradient step."""

    def __init__(self, fault: Fault | None, worker: int, folder: Path, notes: Notes):
        self._fault, self._folder, self._notes = fault, folder, notes
        hit = fault is not None and (worker == fault.victim or fault.kind == "kill all")
        self._due = hit and fault is not None and fault.kind in _BEFORE_A_STEP
        self._spoils = hit and fault is not None and fault.kind == "nan"
        self._worker = worker
        if hit and fault is not None and fault.kind in _FROM_THE_START:
            notes.add("struck", step=0)

    def before(self, step: int, **where: int) -> None:
        """Let the fault come, if its step is reached; `where` is noted with it."""
        fault = self._fault
        if fault is None or not self._due or step < fault.step:
            return
        self._due = False
        self._notes.add("struck", step=step, **where)
        _BEFORE_A_STEP[fault.kind](self, fault)

    def spoil(self, step: int, params: list[torch.nn.Parameter]) -> None:
        """After the gradient is computed."""
        if self._spoils and self._fault is not None and step >= self._fault.step:
            self._spoils = False
            self._notes.add("struck", step=step)
            assert params[0].grad is not None
            params[0].grad.fill_(float("nan"))

    # -- the kinds -------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        # The timer's signal ends the process wherever it is, in the middle of a system call too.
        delay = (fault.chance + 0.37 * self._worker) % 1 * _INSTANT_S
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(1e-4, delay))

    def _kill_in_a_save(self, fault: Fault) -> None:
        left = int(fault.chance * _OPERATIONS)
        folder = str(self._folder)

        def count(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in _OPERATION_EVENTS and str(args[0]).startswith(folder):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(count)

    def _cut_a_write(self, fault: Fault) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        sizes = [path.stat().st_size for path in self._folder.rglob("*.safetensors")]
        bytes = int(fault.chance * max(sizes, default=_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))

    def _stop(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _terminate(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _fill_disk(self, fault: Fault) -> None:
        piece = b"\0" * 4096
        with (self._folder.parent / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(piece)
            except OSError:
                return

    def _make_read_only(self, fault: Fault) -> None:
        place = os.fsencode(self._folder.parent)
        kernel = ctypes.CDLL(None, use_errno=True)
        # It is refused while a file is open for writing.
        for _ in range(1000):
            if kernel.mount(None, place, None, _REMOUNT | _READ_ONLY, None) == 0:
                return
            time.sleep(0.002)
        raise OSError(ctypes.get_errno(), "the disk of this test cannot be made read-only")

    def _jump(self, fault: Fault) -> None:
        jump, now, now_ns = _JUMP_S * (2 * fault.chance - 1), time.time, time.time_ns
        time.time = lambda: now() + jump
        time.time_ns = lambda: now_ns() + int(jump * 1e9)

    def _run_out_of_memory(self, fault: Fault) -> None:
        torch.empty(1 << 50)

    def _cut_link(self, fault: Fault) -> None:
        seconds = 0.3 + fault.chance * 1.2
        up = "" if fault.kind.endswith("for good") else f"; sleep {seconds}; ip link set eth0 up"
        subprocess.Popen(["sh", "-c", f"ip link set eth0 down{up}"], start_new_session=True)


_BEFORE_A_STEP = {
    "kill": Strike._kill,
    "kill all": Strike._kill,
    "truncate": Strike._kill,  # the files are damaged afterwards
    "flip": Strike._kill,
    "kill in a save": Strike._kill_in_a_save,
    "cut a write": Strike._cut_a_write,
    "stop": Strike._stop,
    "stop for good": Strike._stop,
    "terminate": Strike._terminate,
    "full disk": Strike._fill_disk,
    "read-only disk": Strike._make_read_only,
    "clock jump": Strike._jump,
    "out of memory": Strike._run_out_of_memory,
    "out of memory, caught": Strike._run_out_of_memory,
    "second run": Strike._stop,  # until the other one has ended
    "link down": Strike._cut_link,
    "link down for good": Strike._cut_link,
}
