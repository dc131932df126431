"""Workers on a switch, each in a network namespace behind a link of its own."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from palsgd.lab.links import delay_line, kernel
from palsgd.lab.links.kernel import ip, tc
from palsgd.lab.links.link import Link
from palsgd.lab.links.processes import Finished, environment, run_together, tied
from palsgd.lab.links.signals import interrupted_once, signals_raise, signals_wait

MOST_WORKERS = 200
UNLIMITED = Link()
_INTERFACE = "eth0"
_HOST = 254  # its place in the subnet


class Network:
    """`with Network(workers=4, link=Link("100mbit")) as network: network.run([...])`.

    Inside there is a namespace per worker and one for the switch, named after this process. They
    are gone afterwards: after an exception, Ctrl-C or SIGTERM too. Should this process be killed,
    the kernel ends the workers, and the next process that enters a Network removes the namespaces.
    `others` are the links that differ, by worker; `seed` decides which packets are lost.
    """

    def __init__(
        self,
        workers: int,
        link: Link = UNLIMITED,
        others: Mapping[int, Link] | None = None,
        *,
        seed: int = 0,
    ):
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(f"workers={workers} must be from 1 to {MOST_WORKERS}")
        self.workers = workers
        self.links = [(others or {}).get(worker, link) for worker in range(workers)]
        unknown = sorted(set(others or {}) - set(range(workers)))
        if unknown:
            raise ValueError(
                f"there is no worker {unknown[0]} among {workers}; they count from 0 to "
                f"{workers - 1}"
            )
        self._seed = seed
        self._undo = contextlib.ExitStack()
        self._runs = 0

    def __enter__(self) -> "Network":
        if reason := kernel.unavailable():
            raise RuntimeError(reason)
        kernel.remove_leftovers()
        self._hub, *self._inside = kernel.new_names(
            ["hub", *(f"w{worker}" for worker in range(self.workers))]
        )
        self._port = kernel.port_of(self._hub)
        with contextlib.ExitStack() as undo:
            undo.enter_context(interrupted_once())
            undo.enter_context(signals_raise())
            undo.callback(self._tear_down)
            self._lines: list[subprocess.Popen[bytes]] = []
            self._build()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    # -- what it is for --------------------------------------------------------------------------

    @property
    def host_address(self) -> str:
        """The address of this machine in the workers' network."""
        return self._address(_HOST)

    def address(self, worker: int) -> str:
        return self._address(worker + 1)

    def namespace(self, worker: int) -> str:
        """The name that `ip netns exec` knows the worker's place by."""
        return self._inside[worker]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
        cwd: Path | str | None = None,
        echo: bool = False,
    ) -> list[Finished]:
        """The command once per worker, each in its namespace, with what torch.distributed reads
        from the environment. RuntimeError names the worker that fails; the others are ended. With
        `echo` the stderr of worker 0 is this process's."""
        self._runs += 1
        port = 29500 + self._runs % 1000
        environments = [
            environment(worker, self.workers, self.address(0), port, _INTERFACE) | dict(env or {})
            for worker in range(self.workers)
        ]
        commands = [["ip", "netns", "exec", each, *tied(command)] for each in self._inside]
        return run_together(commands, environments, timeout=timeout, cwd=cwd, echo=echo)

    def bytes_sent(self) -> list[int]:
        """The bytes that each worker has sent since the network was built, as the kernel counts
        them: Ethernet, IP and TCP headers and acknowledgements are included."""
        show = f"-json -statistics link show dev {_INTERFACE}"
        found = [json.loads(ip(show, inside=each))[0] for each in self._inside]
        return [each["stats64"]["tx"]["bytes"] for each in found]

    # -- building --------------------------------------------------------------------------------

    def _build(self) -> None:
        # The switch has a namespace of its own: there no firewall of the host looks at what is
        # forwarded, and with it every port and cable goes.
        self._add_namespace(self._hub)
        ip("link add switch type bridge", inside=self._hub)
        ip("link set switch up", inside=self._hub)
        self._subnet = _free_subnet()
        self._add_host()
        for worker in range(self.workers):
            self._add_worker(worker)

    def _add_host(self) -> None:
        ip(f"link add {self._port} type veth peer name host netns {self._hub}")
        ip(f"address add {self.host_address}/24 dev {self._port}")
        ip(f"link set {self._port} up")
        self._plug_in("host")

    def _add_worker(self, worker: int) -> None:
        inside, link, port = self._inside[worker], self.links[worker], f"w{worker}"
        self._add_namespace(inside)
        if link.slow_only or kernel.has_netem():
            ends = f"{_INTERFACE} netns {inside} type veth peer name {port} netns {self._hub}"
            ip(f"link add {ends}")
        else:
            self._add_delay_line(worker)
        if link.loss:  # packets are lost one by one, not as the 64 kB that TCP would hand over
            ip(f"link set {_INTERFACE} gso_max_segs 1", inside=inside)
        ip(f"address add {self.address(worker)}/24 dev {_INTERFACE}", inside=inside)
        ip(f"link set {_INTERFACE} up", inside=inside)
        self._plug_in(port)
        self._shape(worker)

    def _add_delay_line(self, worker: int) -> None:
        link, tap, files = self.links[worker], f"{self._port}t", []
        try:
            for namespace, name in ((self._inside[worker], _INTERFACE), (self._hub, f"w{worker}")):
                files.append(delay_line.open_tap(tap, large_packets=not link.loss))
                ip(f"link set {tap} netns {namespace} name {name}")
                ip(f"link set {name} txqueuelen 10000", inside=namespace)
        except BaseException as error:
            for file in files:
                os.close(file)
            if isinstance(error, OSError):
                raise RuntimeError(
                    "a link with delay or loss needs the kernel's netem or /dev/net/tun; here "
                    f"there is neither ({error.strerror})"
                ) from None
            raise
        started = delay_line.start(
            *files, delay_s=link.delay_ms / 1e3, loss=link.loss, seed=self._seed + worker
        )
        self._lines.append(started)

    def _shape(self, worker: int) -> None:
        """What the worker sends on its own side; what it is sent where it leaves the switch."""
        inside, link, port = self._inside[worker], self.links[worker], f"w{worker}"
        place = "root"
        if not link.slow_only and kernel.has_netem():
            held = f"netem limit 1000000 delay {link.delay_ms}ms loss {100 * link.loss}%"
            tc(f"qdisc add dev {_INTERFACE} root handle 1: {held}", inside=inside)
            place = "parent 1:1"
        if link.rate is not None:
            tc(f"qdisc add dev {_INTERFACE} {place} {link.shaper()}", inside=inside)
            tc(f"qdisc add dev {port} root {link.shaper()}", inside=self._hub)

    def _plug_in(self, port: str) -> None:
        ip(f"link set {port} master switch up", inside=self._hub)

    def _add_namespace(self, name: str) -> None:
        ip(f"netns add {name}")
        ip("link set lo up", inside=name)
        kernel.command("ip", "netns", "exec", name, "sh", "-c", _NO_IPV6)

    def _address(self, place: int) -> str:
        return f"198.18.{self._subnet}.{place}"

    # -- tearing down ----------------------------------------------------------------------------

    def _tear_down(self) -> None:
        with signals_wait():
            for line in self._lines:
                line.kill()
                line.wait()
            for namespace in (*self._inside, self._hub):
                kernel.remove(namespace)


# IPv6 only adds its own chatter to the counters
_NO_IPV6 = """
for each in /proc/sys/net/ipv6/conf/all /proc/sys/net/ipv6/conf/default; do
    if [ -d $each ]; then echo 1 > $each/disable_ipv6; fi
done
"""


def _free_subnet() -> int:
    """The number of a free subnet of 198.18.0.0/16, which is reserved for measuring networks. The
    search starts at a place that depends on the process, so that two processes that start at once
    choose different ones."""
    used = set(map(int, re.findall(r"198\.18\.(\d+)\.", ip("-4 address") + ip("-4 route"))))
    start = os.getpid()
    for number in ((start + each) % 256 for each in range(256)):
        if number not in used:
            return number
    raise RuntimeError("all 256 subnets of 198.18.0.0/16 are in use; end other networks first")
