"""Network namespaces and traffic shaping, through the commands `ip` and `tc`."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from palsgd.lab.links.signals import interrupted_once

NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"palsgd-(\d+)-(\d+)-(hub|w\d+)")


def command(*words: str) -> str:
    """What it prints; if it fails, one line on what was tried and what the answer was. Ctrl-C does
    not reach it: whatever is begun here is finished, and then undone."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        raise RuntimeError(f"`{' '.join(words)}` failed: {said}")
    return done.stdout


def ip(words: str, *, inside: str | None = None) -> str:
    return command("ip", *(("-n", inside) if inside else ()), *words.split())


def tc(words: str, *, inside: str) -> str:
    return command("tc", "-n", inside, *words.split())


def unavailable() -> str | None:
    """The reason in one line why namespaces cannot be used here, or None."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root; run the command with sudo"
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            return f"the command {name} is missing; install iproute2"
    return _trial()


@functools.cache
def _trial() -> str | None:
    """A container's root may not be allowed to, and a kernel may lack the shaper."""
    try:
        with _scratch() as inside:
            ip("link add end0 type veth peer name end1", inside=inside)
            ip("link add switch type bridge", inside=inside)
            tc("qdisc add dev end0 root tbf rate 1mbit burst 3000 limit 9000", inside=inside)
    except RuntimeError as error:
        return f"network namespaces do not work here: {error}"
    return None


@functools.cache
def has_netem() -> bool:
    """Whether the kernel itself can delay and drop packets."""
    try:
        with _scratch() as inside:
            tc("qdisc add dev lo root netem delay 1ms", inside=inside)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    (name,) = new_names(["w0"])
    with interrupted_once():
        try:
            ip(f"netns add {name}")
            yield name
        finally:
            remove(name)


def new_names(parts: list[str]) -> list[str]:
    """Names for namespaces of this process, with a number that none of its other namespaces has."""
    pid = os.getpid()
    for number in itertools.count():
        if not any(NAMESPACES.glob(f"palsgd-{pid}-{number}-*")):
            return [f"palsgd-{pid}-{number}-{part}" for part in parts]
    raise AssertionError


def remove(namespace: str) -> None:
    """Remove a namespace with the processes that are still in it. The kernel removes its interfaces
    some time later; the interface of this machine is removed at once."""
    deadline = time.monotonic() + 10
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} in namespace {namespace} cannot be ended")
        time.sleep(0.01)
    port = port_of(namespace)
    _unless_gone(Path("/sys/class/net", port), f"link delete {port}")
    _unless_gone(NAMESPACES / namespace, f"netns delete {namespace}")


def port_of(namespace: str) -> str:
    """This machine's interface to the network a namespace belongs to: at most 15 letters."""
    return namespace.rpartition("-")[0].replace("palsgd-", "pg")


def _pids(namespace: str) -> list[int]:
    found = _unless_gone(NAMESPACES / namespace, f"netns pids {namespace}")
    return [int(pid) for pid in found.split()]


def _unless_gone(path: Path, words: str) -> str:
    """Run the command, and ignore its failure if `path` is gone, as another process may remove the
    same namespaces."""
    try:
        return ip(words) if path.exists() else ""
    except RuntimeError:
        if path.exists():
            raise
        return ""


def remove_leftovers() -> list[str]:
    """The namespaces whose creator was killed before it could remove them."""
    found = sorted(path.name for path in NAMESPACES.glob("palsgd-*") if _abandoned(path))
    for name in found:
        remove(name)
    return found


def _abandoned(path: Path) -> bool:
    """Has the creator of the namespace ended? A process with the creator's number that started
    later is another one."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        return False
    try:
        return _started(int(named[1])) > path.stat().st_mtime + 1
    except FileNotFoundError:
        return True


def _started(pid: int) -> float:
    """The instant at which a process started, in seconds since 1970."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    assert boot is not None
    return int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK")
