"""What SIGTERM does to a worker: it asks all workers to leave at the next sync, within a bound.

Machines that are lent send SIGTERM before they are taken back, and launchers send it on to their
workers. Python calls the handler of a signal between two of its own instructions, hence not while
an exchange waits for a lost worker. So a thread keeps the time; the kernel's side of the handler
writes into its pipe at once.
"""

import math
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from weakref import WeakSet

from palsgd.checks import check_number
from palsgd.local_optimizer import LocalOptimizer

EXIT_CODE = 128 + signal.SIGTERM  # 143, of a worker that left because it was asked to

_optimizers: "WeakSet[LocalOptimizer]" = WeakSet()
_pipe: list[int] = []  # the end to write to, once there is a handler
_asked = False


def leave_on_sigterm(opt: LocalOptimizer, *, within_s: float = 25.0) -> None:
    """From now on SIGTERM ends the training of all workers at the next sync.

    `opt.leaving` is True on all workers there, and a loop over `palsgd.until` ends. Then save, and
    end the program with exit code 143:

        if opt.leaving:
            palsgd.checkpoint.save("checkpoints", model, opt)
            sys.exit(143)

    A worker that has not ended after `within_s` seconds, as another one is lost or rounds are long,
    ends without saving, and so does one that receives SIGTERM a second time. Every worker calls
    this, in its main thread. It does nothing but note `opt` if it was called before.

    Args:
        opt: a palsgd optimizer.
        within_s: the seconds that a worker has. Whoever sends SIGTERM gives a time too, after which
            SIGKILL follows: torchrun and Kubernetes 30 seconds unless they are told otherwise.

    Raises:
        ValueError: `within_s` is no number > 0, or this is not the main thread.

    Example:
        >>> import os, signal, torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalSGD(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> before = signal.getsignal(signal.SIGTERM)
        >>> palsgd.leave_on_sigterm(opt, within_s=60)
        >>> opt.leave()  # as SIGTERM does
        >>> for batch in palsgd.until([torch.ones(1, 2)], opt, steps=6):
        ...     raise AssertionError("there is no step after that")
        >>> opt.leaving
        True
        >>> _ = signal.signal(signal.SIGTERM, before)
    """
    check_number("within_s", within_s, "a number of seconds > 0", low=0.0)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "leave_on_sigterm() was called in another thread than the main one, which alone "
            "receives signals; call it there, or call opt.leave() yourself"
        )
    opt.hear_leavers()
    _optimizers.add(opt)
    if _asked:
        opt.leave()
    if signal.getsignal(signal.SIGTERM) is not _ask:
        _listen(within_s)


def _listen(within_s: float) -> None:
    """Install the handler, and start the thread that keeps the time."""
    signal.signal(signal.SIGTERM, _ask)
    if sys.platform == "win32":  # nobody sends SIGTERM there
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    _pipe[:] = [writing]
    taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if taken != -1:  # another library's, such as an event loop's; our handler writes instead
        signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
        _pipe.append(writing)
    threading.Thread(target=_keep_time, args=(reading, within_s), daemon=True).start()


def _ask(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True
    if len(_pipe) > 1:
        os.write(_pipe[1], bytes([number]))
    for opt in list(_optimizers):
        opt.leave()


def _keep_time(reading: int, within_s: float) -> None:
    _comes(reading, math.inf)
    again = _comes(reading, within_s)
    why = "SIGTERM came again" if again else f"no sync was reached within {within_s:g} s of SIGTERM"
    os.write(2, f"palsgd: {why}; this worker leaves without saving\n".encode())
    os._exit(EXIT_CODE)


def _comes(reading: int, within_s: float) -> bool:
    """Wait for SIGTERM, for at most so long. Signals that have other handlers pass by."""
    deadline = time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reading], [], [], None if math.isinf(left) else left)
        came = ready and os.read(reading, 1) == bytes([signal.SIGTERM])
        if came and signal.getsignal(signal.SIGTERM) is _ask:
            return True
    return False
