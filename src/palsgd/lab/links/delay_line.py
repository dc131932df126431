"""Holds and drops packets where the kernel cannot: a process between two TAP devices.

The worker's `eth0` is one of them, a port of the switch is the other. What the worker sends is
read from the first, held for the link's delay or dropped, and written to the second; what it is
sent goes through at once. `python delay_line.py WORKER_FD SWITCH_FD SECONDS LOSS SEED` is the
process, run by itself as a file so that it starts quickly.
"""

import contextlib
import fcntl
import gc
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_V4, _SEGMENTS_V6 = 0x01, 0x02, 0x04
_LARGEST = 1 << 17  # bytes; no packet is larger
_AT_ONCE = 64  # packets read from one side before the other has its turn


def open_tap(name: str, *, large_packets: bool) -> int:
    """A new TAP device, which lasts as long as its file is open, in whatever namespace it is moved
    to. With large packets TCP hands over up to 64 kB at a time, to be cut up at the very end: a
    few thousand packets a second are what one process can carry."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _TAP | _NO_PACKET_INFO | _OFFLOAD_HEADER
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", name.encode(), flags))
        able = _CHECKSUM | _SEGMENTS_V4 | _SEGMENTS_V6 if large_packets else _CHECKSUM
        fcntl.ioctl(file, _TUNSETOFFLOAD, able)
    except BaseException:
        os.close(file)
        raise
    return file


def start(
    worker: int, switch: int, *, delay_s: float, loss: float, seed: int
) -> subprocess.Popen[bytes]:
    """The process; the two files are its own from here on."""
    from palsgd.lab.links.processes import tied

    figures = [str(each) for each in (worker, switch, delay_s, loss, seed)]
    try:
        return subprocess.Popen(
            tied([sys.executable, "-S", "-E", __file__, *figures]),
            pass_fds=(worker, switch),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the creator, which ends this one
        )
    finally:
        os.close(worker)
        os.close(switch)


def carry(worker: int, switch: int, delay_s: float, loss: float, seed: int) -> None:
    chance = random.Random(seed)
    held: deque[tuple[float, bytes]] = deque()  # when it is due, and the packet: in this order
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select((worker, switch), (), (), wait)
        if switch in ready:
            for packet in _packets(switch):
                _send(worker, packet)
        if worker in ready:
            due = time.monotonic() + delay_s
            held.extend((due, packet) for packet in _packets(worker) if chance.random() >= loss)
        now = time.monotonic()
        while held and held[0][0] <= now:
            _send(switch, held.popleft()[1])


def _packets(file: int) -> Iterator[bytes]:
    for _ in range(_AT_ONCE):
        try:
            yield os.read(file, _LARGEST)
        except BlockingIOError:
            return


def _send(file: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down or full; TCP will send again
        os.write(file, packet)


def main() -> None:
    gc.disable()
    os.nice(-10)  # a packet that is due goes before the workers' arithmetic
    worker, switch, delay_s, loss, seed = sys.argv[1:]
    carry(int(worker), int(switch), float(delay_s), float(loss), int(seed))


if __name__ == "__main__":
    main()
