"""Worker processes in a network namespace of their own, where the kernel counts every byte they
send and nobody else sends one."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.world import World

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def can_be_used() -> bool:
    """Not for a user who may not make namespaces. Root must be able to, so a test that needs them
    fails there instead of being skipped."""
    return sys.platform == "linux" and os.getuid() == 0


needs_namespace = pytest.mark.skipif(not can_be_used(), reason="needs root on Linux")


@contextmanager
def world_alone() -> Iterator[World]:
    """Worker processes whose only network is a loopback of their own."""
    world = World()
    with _another_network():
        world.run(bytes_so_far, workers=2)  # the processes start here, and stay in this network
    try:
        yield world
    finally:
        world.close()


def bytes_so_far() -> int:
    """The bytes that the kernel has sent over this process's loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()
    return int(fields[8])


@contextmanager
def _another_network() -> Iterator[None]:
    """Inside, processes that this thread starts begin in a new network namespace. The kernel
    removes it with the last of them."""
    kernel = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own:
        _check(kernel.unshare(_NEW_NETWORK))
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=60)
            yield
        finally:
            _check(kernel.setns(own.fileno(), _NEW_NETWORK))


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), "no network namespace for this test")
