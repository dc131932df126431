"""Tests that need network namespaces, and worker processes in one, where the kernel counts every
byte that they send and nobody else sends one."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palsgd.lab.links import unavailable
from palsgd.lab.links.kernel import NAMESPACES
from support.world import World

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def may_make_namespaces() -> bool:
    return os.geteuid() == 0


def needs_namespaces(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that needs network namespaces. Setting them up makes each of these slow. A user
    may not make namespaces, so the test is skipped; root may, so where they do not work the test
    fails and says why."""
    if not may_make_namespaces():
        return pytest.mark.slow(pytest.mark.skip(reason=str(unavailable()))(test))

    @functools.wraps(test)
    def with_namespaces(*args: Any, **kwargs: Any) -> Any:
        reason = unavailable()
        if reason is not None:
            pytest.fail(reason)
        return test(*args, **kwargs)

    return pytest.mark.slow(with_namespaces)


@contextmanager
def world_alone(workers: int = 2) -> Iterator[World]:
    """Worker processes whose only network is a loopback of their own."""
    world = World(fresh=True)
    with _another_network():
        world.run(
            bytes_so_far, workers=workers
        )  # the processes start here, and stay in this network
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


def enter_network(namespace: str) -> None:
    """Move this process into a network namespace that has a name."""
    kernel = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as place:
        _check(kernel.setns(place.fileno(), _NEW_NETWORK))


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), "no network namespace for this test")
