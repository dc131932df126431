"""Emulated links: real packets through network namespaces, and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from palsgd.lab import bench_link
from palsgd.lab.links import Link, Network, kernel
from palsgd.lab.links.kernel import NAMESPACES, remove_leftovers
from palsgd.lab.links.link import modelled_ring_seconds
from palsgd.payload import wire_bytes
from support import namespaces as namespaces_support
from support.commands import palsgd, records, started, summary, wait_for
from support.holding import holder
from support.namespaces import needs_namespaces
from support.patience import patient


def script(code: str) -> list[str]:
    """A command that starts quickly."""
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def namespaces(pid: int | None = None) -> list[str]:
    pid = os.getpid() if pid is None else pid
    return sorted(path.name for path in NAMESPACES.glob(f"palsgd-{pid}-*"))


def interfaces(pid: int) -> list[str]:
    return [path.name for path in Path("/sys/class/net").glob(f"pg{pid}-*")]


# -- what a link does to packets -----------------------------------------------------------------

ECHO = """
    import os, socket, time
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    port.settimeout({patience})
    if rank == 0:
        port.bind((os.environ["MASTER_ADDR"], 5000))
        left = size - 1
        while left:
            try:
                text, sender = port.recvfrom(100)
            except TimeoutError:
                continue
            if text == b"end":
                left -= 1
            port.sendto(text, sender)
    else:
        there = (os.environ["MASTER_ADDR"], 5000)
        def asked(text):
            began = time.monotonic()
            port.sendto(text, there)
            try:
                while port.recvfrom(100)[0] != text:
                    pass
            except (TimeoutError, ConnectionRefusedError):
                time.sleep({patience} / 10)
                return None
            return time.monotonic() - began
        while asked(b"hello") is None:
            pass
        answers = [asked(b"%d" % number) for number in range({count})]
        while asked(b"end") is None:
            pass
        print([each for each in answers if each is not None])
"""


def answers(network: Network, *, count: int, patience: float) -> dict[int, list[float]]:
    """How long each worker but the first waited for its packets to come back, if they did."""
    done = network.run(script(ECHO.format(count=count, patience=patience)), timeout=patient(60))
    return {each.worker: json.loads(each.stdout) for each in done[1:]}


NETEM = os.geteuid() == 0 and kernel.unavailable() is None and kernel.has_netem()


@pytest.fixture(params=["netem", "delay line"] if NETEM else ["delay line"])
def delays(request, monkeypatch):
    """Delay and loss by netem where the kernel has it, and by the delay line in its place."""
    if request.param == "delay line":
        monkeypatch.setattr(kernel, "has_netem", lambda: False)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may make namespaces")
def test_where_root_cannot_make_namespaces_the_tests_that_need_them_fail(monkeypatch):
    monkeypatch.setattr(namespaces_support, "unavailable", lambda: "no veth here")

    def passes():  # pytest puts no mark on a lambda
        pass

    with pytest.raises(BaseException, match="no veth here") as told:  # a skip is one too
        needs_namespaces(passes)()
    assert told.type is pytest.fail.Exception


@needs_namespaces
def test_a_packet_is_delayed_by_its_sender_so_a_round_trip_takes_both_delays(delays):
    with Network(3, Link(delay_ms=40.0), others={2: Link(delay_ms=100.0)}) as network:
        seconds = answers(network, count=5, patience=2.0)
    assert len(seconds[1]) == len(seconds[2]) == 5
    assert min(seconds[1]) >= 0.080
    assert min(seconds[2]) >= 0.140


@needs_namespaces
def test_a_lossy_link_drops_its_share_of_what_that_worker_sends_and_no_other_link_drops_any(
    delays,
):
    with Network(3, others={2: Link(loss=0.3)}) as network:
        seconds = answers(network, count=200, patience=0.05)
    # Binomial(200, 0.7) is within 105 and 175 but for one case in 10 million; worker 1, which may
    # be late on a busy machine, is allowed a few.
    assert 105 < len(seconds[2]) < 175
    assert len(seconds[1]) > 190


TRANSFER = """
    import os, socket, sys, time
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if rank == 0:
        server = socket.create_server((address, 5000))
        connection, _ = server.accept()
        first, received = connection.recv(1), 1
        began = time.monotonic()
        while part := connection.recv(1 << 20):
            received += len(part)
        print(received, time.monotonic() - began)
    elif rank == 1:
        for _ in range(200):
            try:
                sender = socket.create_connection((address, 5000))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        sender.sendall(bytes({size}))
        sender.close()
"""


@needs_namespaces
@pytest.mark.parametrize(
    "links",
    [
        pytest.param({}, id="both"),
        pytest.param({1: Link()}, id="receiver"),
        pytest.param({0: Link()}, id="sender"),
        pytest.param({1: Link("10mbit", delay_ms=1.0)}, id="behind a delay"),
    ],
)
def test_no_more_gets_through_than_the_rate_of_the_slower_end_allows(links):
    size, rate = 250_000, 10e6
    with Network(2, Link("10mbit"), others=links) as network:
        received, seconds = network.run(script(TRANSFER.format(size=size)))[0].stdout.split()
    assert int(received) == size
    free = 2 * 2e-3 * rate / 8 + 64 * 1514  # two full buckets, and what came with the first byte
    assert float(seconds) >= 8 * (size - free) / rate


@needs_namespaces
def test_bytes_sent_counts_each_workers_packets_with_their_headers():
    size = 250_000
    with Network(3, Link("100mbit")) as network:
        before = network.bytes_sent()
        network.run(script(TRANSFER.format(size=size)))
        sent = [after - then for after, then in zip(network.bytes_sent(), before, strict=True)]
    assert size < sent[1] < 1.3 * size
    assert sent[0] < 0.2 * size  # acknowledgements
    assert sent[2] < 2_000


# -- processes -----------------------------------------------------------------------------------


@needs_namespaces
def test_workers_find_what_torch_distributed_wants_to_know():
    code = """
        import os
        print({name: os.environ[name] for name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
            "GLOO_SOCKET_IFNAME", "EXTRA")}, os.environ["MASTER_PORT"].isdigit(), os.getcwd())
    """
    with Network(2) as network:
        done = network.run(script(code), env={"EXTRA": "yes"}, cwd="/")
        wanted = {
            "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0), "GLOO_SOCKET_IFNAME": "eth0", "EXTRA": "yes",
        }  # fmt: skip
    for rank, each in enumerate(done):
        assert (each.worker, each.returncode, each.stderr) == (rank, 0, "")
        assert each.stdout.strip() == f"{ {'RANK': str(rank)} | wanted } True /"


@needs_namespaces
def test_an_all_reduce_over_gloo_gives_the_sum_and_sends_what_a_ring_sends():
    code = """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        values = torch.full((250_000,), float(dist.get_rank() + 1))
        dist.all_reduce(values)
        assert (values == 6).all()
        dist.barrier()
        dist.destroy_process_group()
    """
    with Network(3, Link("1gbit")) as network:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        network.run(command, timeout=patient(120))
        sent = network.bytes_sent()
    for each in sent:
        assert 1.0 <= each / wire_bytes(1e6, 3) < 1.2


@needs_namespaces
def test_a_worker_that_fails_is_named_with_its_last_line_and_the_others_are_ended():
    code = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit("first line\\nthe disk is full")
        time.sleep(600)
    """
    with Network(3) as network:
        with pytest.raises(RuntimeError) as found:
            network.run(script(code))
        assert str(found.value) == "worker 1 failed with exit code 1: the disk is full"
        assert pids_of(namespaces()) == []


@needs_namespaces
def test_workers_that_take_too_long_are_named_and_ended():
    code = 'import os, time; time.sleep(600 if os.environ["RANK"] != "1" else 0)'
    with Network(3) as network:
        with pytest.raises(RuntimeError, match=r"worker 0, 2 had not finished after 0\.5 s"):
            network.run(script(code), timeout=0.5)
        assert pids_of(namespaces()) == []


@needs_namespaces
def test_a_server_on_this_machine_is_reached_by_all_workers():
    code = """
        import socket, sys
        with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as server:
            print(server.recv(100).decode())
    """
    with Network(2) as network, socket.create_server((network.host_address, 0)) as server:
        threading.Thread(target=greet, args=(server, 2), daemon=True).start()
        port = str(server.getsockname()[1])
        done = network.run([*script(code), network.host_address, port], timeout=patient(60))
    assert [each.stdout.strip() for each in done] == ["hello", "hello"]


def greet(server: socket.socket, times: int) -> None:
    for _ in range(times):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"hello")


def pids_of(names: list[str]) -> list[str]:
    lists = [subprocess.check_output(["ip", "netns", "pids", name], text=True) for name in names]
    return [pid for each in lists for pid in each.split()]


# -- nothing is left behind ----------------------------------------------------------------------


@needs_namespaces
def test_two_networks_at_once_do_not_meet():
    with Network(1) as one, Network(1) as other:
        assert len(namespaces()) == 4
        assert one.host_address != other.host_address
    assert namespaces() == interfaces(os.getpid()) == []


@needs_namespaces
def test_a_process_that_a_worker_left_running_ends_with_the_network():
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with Network(1) as network:
        network.run(script(code))
        (pid,) = pids_of(namespaces())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


@needs_namespaces
def test_an_exception_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), Network(2, Link("1mbit", delay_ms=5.0)):
        raise ZeroDivisionError
    assert namespaces() == interfaces(os.getpid()) == []


@needs_namespaces
def test_a_network_that_cannot_be_built_leaves_nothing_behind(monkeypatch):
    from palsgd.lab.links import network as module

    real = module.tc
    calls = []

    def tc(words, *, inside):
        calls.append(words)
        return real(words.replace("tbf", "nonsense") if len(calls) == 3 else words, inside=inside)

    monkeypatch.setattr(module, "tc", tc)
    with pytest.raises(RuntimeError, match="nonsense"), Network(2, Link("1mbit")):
        pass
    assert namespaces() == interfaces(os.getpid()) == []


def workers_of(pid: int) -> list[str]:
    """The processes in the namespaces of `pid`, once all of them have come up."""
    names = [name for name in namespaces(pid) if not name.endswith("hub")]
    wait_for(lambda: len(sleeping(names)) == 2, process=None)
    return sleeping(names)


def sleeping(names: list[str]) -> list[str]:
    return [pid for pid in pids_of(names) if comm(pid) == "sleep"]


def comm(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_leaves_nothing_behind(number):
    with holder() as process:
        workers = workers_of(process.pid)
        os.kill(process.pid, number)
        process.join(timeout=patient(60))
        # multiprocessing makes 1 of KeyboardInterrupt
        assert process.exitcode == (1 if number == signal.SIGINT else 128 + number)
        assert namespaces(process.pid) == interfaces(process.pid) == []
        assert not any(map(comm, workers))


@needs_namespaces
def test_of_a_killed_process_nothing_survives_and_the_next_network_removes_the_namespaces():
    with holder() as process:
        workers = workers_of(process.pid)
        lines = [pid for pid in children(process.pid) if pid not in workers]
        assert len(lines) == 2
        process.kill()
        process.join(timeout=patient(60))
        wait_for(lambda: not any(map(comm, [*workers, *lines])), process=None, timeout=20)
        with Network(1):
            assert namespaces(process.pid) == []
        assert interfaces(process.pid) == []


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@needs_namespaces
def test_a_network_in_use_is_nobodys_leftover():
    with holder() as process:
        held = namespaces(process.pid)
        assert len(held) == 3
        assert not set(held) & set(remove_leftovers())
        assert namespaces(process.pid) == held


@needs_namespaces
def test_a_namespace_older_than_the_process_of_its_number_is_left_over():
    with Network(1):
        time.sleep(2.1)  # times of processes and namespaces are compared to the second
        other = subprocess.Popen(["sleep", "600"])
        try:
            name = f"palsgd-{other.pid}-0-w0"
            (NAMESPACES / name).touch()  # a second name for our namespace
            ours = NAMESPACES / namespaces()[1]
            subprocess.check_call(["mount", "--bind", ours, NAMESPACES / name])
            assert name in remove_leftovers()
            assert namespaces(other.pid) == []
        finally:
            other.kill()
            other.wait()
        assert len(namespaces()) == 2


# -- the bench -----------------------------------------------------------------------------------

TINY = ("digits", "--workers", 2, "--steps", 8, "--sync-every", 4, "--quiet")


@needs_namespaces
def test_bench_link_runs_all_methods_and_its_ledgers_agree_with_the_kernel(tmp_path):
    said = palsgd("bench", "link", *TINY, "--rate", "20mbit", "--latency", 2, "--slow-worker",
                  "10mbit", "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0, said.err
    assert "PROJECTION" not in said.out
    assert "2 workers, 20mbit, 2 ms; worker 1: 10mbit, 2 ms" in said.out
    found = json.loads((tmp_path / "x" / "link.json").read_text())
    assert found["projected"] is None
    assert [link["rate"] for link in found["links"]] == ["20mbit", "10mbit"]
    ring = found["ring"]
    assert ring["theory_s"] == pytest.approx(8 * ring["bytes"] / 10e6 + 2 * 2e-3)
    assert ring["seconds"] >= 2 * 2e-3
    assert list(found["methods"]) == list(records(tmp_path / "x"))
    assert sorted(found["methods"]) == ["ddp", "diloco", "localsgd", "palsgd"]
    for name, record in found["methods"].items():
        assert 1.0 <= record["kernel_over_ring"] < 1.5, name
        assert record["bytes_sent"] == summary(tmp_path / "x")[name]["bytes_sent"]
        assert f"{name} " in said.out
    ddp, diloco = found["methods"]["ddp"], found["methods"]["diloco"]
    assert (ddp["syncs"], diloco["syncs"]) == (8, 2)
    assert diloco["speedup_over_ddp"] == ddp["step_s"] / diloco["step_s"]
    assert namespaces() == interfaces(os.getpid()) == []


@pytest.mark.slow
def test_bench_link_without_namespaces_says_why_and_projects(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no command ip there
    said = palsgd("bench", "link", *TINY, "--rate", "20mbit", "--latency", 2, "--methods",
                  "ddp,diloco", "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0, said.err
    assert "Times are projected from a run over loopback instead." in said.line
    assert "PROJECTION, nothing was sent over these links" in said.out
    found = json.loads((tmp_path / "x" / "link.json").read_text())
    assert said.line.startswith(found["projected"])
    assert found["methods"]["ddp"]["kernel_bytes"] is None
    for record in found["methods"].values():
        messages = record["messages"] or record["syncs"]
        wire = 8 * record["bytes_sent"] / 20e6 + messages * 2 * 2e-3
        total = 8 * record["projected_step_s"]
        assert record["projected_communicating"] == pytest.approx(wire / total)


@needs_namespaces
def test_ctrl_c_ends_bench_link_with_one_line_and_nothing_behind(tmp_path):
    with started("bench", "link", *TINY, "--steps", 100_000, "--out", tmp_path / "x") as process:
        wait_for(lambda: len(namespaces(process.pid)) == 3, process=process)
        workers = [name for name in namespaces(process.pid) if not name.endswith("hub")]
        wait_for(lambda: len(pids_of(workers)) >= 2, process=process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 130
    assert err == f"palsgd: stopped; what is done is in {tmp_path / 'x'}\n"
    assert namespaces(process.pid) == interfaces(process.pid) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rate", "fast"], "rate='fast' is no rate from 8kbit to 1000gbit; write for instance"),
        (["--rate", "1.2.3mbit"], "rate='1.2.3mbit' is no rate"),
        (["--slow-worker", "0mbit"], "rate='0mbit' is no rate"),
        (["--latency", "-1"], "latency='-1' must be a time of 0 ms or more"),
        (["--loss", "1"], "loss=1.0 must be a share in [0, 1), for instance 0.01"),
        (["--lossy", "nan"], "loss=nan must be a share"),
        (["--methods", "ddp,sgd"], "method='sgd' is unknown"),
        (["stepz=3"], "there is no setting 'stepz'; did you mean 'steps'?"),
        (["storys"], "recipe 'storys' is unknown; did you mean 'stories'?"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(words, line, tmp_path):
    said = palsgd("bench", "link", *words, "--out", tmp_path / "x")
    assert said.code == 2
    assert line in said.line
    assert not (tmp_path / "x").exists()


def test_the_first_gradient_which_ledgers_do_not_time_counts_as_computing():
    run = dict(
        wall_s=10.0, steps=8, gradient_steps=5.0, syncs=2.0, messages=2.0, bytes_sent=4e6,
        bytes_on_the_wire=4e6, kernel_bytes=4e6, gradient_s=4.0, mixing_s=1.0, compute_s=1.5,
    )  # fmt: skip
    links = [Link("8mbit")] * 2
    local = bench_link.figures("palsgd", run, links)
    assert local["exchange_s"] == pytest.approx((10 - 5 * 1.0 - 1) / 2)
    assert local["communicating"] == pytest.approx(0.4)
    assert local["projected_step_s"] == pytest.approx((6 + 4) / 8)
    ddp = bench_link.figures("ddp", run, links)  # whose ledger has exchanges in its gradients
    assert ddp["exchange_s"] == pytest.approx((10 - 5 * 1.5) / 2)


def test_a_folder_in_use_is_not_overwritten_unasked(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    said = palsgd("bench", "link", *TINY, "--out", tmp_path)
    assert said.code == 2
    assert "exists and is not empty; add --force to start over" in said.line


def test_help_has_an_example():
    said = palsgd("bench", "link", "--help")
    assert said.code == 0
    assert "Example: palsgd bench link stories --workers 4 --rate 100mbit --latency 20" in said.out


def test_a_worker_that_does_not_exist_cannot_have_a_link():
    with pytest.raises(ValueError, match="no worker 4 among 4; they count from 0 to 3"):
        Network(4, others={4: Link()})


# -- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_rings_bytes_and_hops_are_those_of_a_ring_that_is_walked_through(workers):
    """An independent twin: K arrays of K parts go round in NumPy, hop by hop."""
    rng = np.random.default_rng(workers)
    parts = rng.standard_normal((workers, workers, 6))
    held, sent, hops = parts.copy(), np.zeros(workers), 0
    for phase in range(2):
        for step in range(workers - 1):
            moving = [(k, (k - step + phase) % workers) for k in range(workers)]
            packets = [held[k, part].copy() for k, part in moving]
            for (k, part), packet in zip(moving, packets, strict=True):
                there = (k + 1) % workers
                held[there, part] = packet if phase else held[there, part] + packet
                sent[k] += packet.nbytes
            hops += 1
    np.testing.assert_allclose(held, np.broadcast_to(parts.sum(0), held.shape))
    assert set(sent) == {wire_bytes(parts[0].nbytes, workers)}
    links = [Link("8mbit", delay_ms=3.0)] * workers
    assert modelled_ring_seconds(links, parts[0].nbytes) == pytest.approx(
        sent[0] / 1e6 + hops * 3e-3
    )


def test_the_slowest_link_sets_the_pace_and_delays_add_up_along_the_ring():
    links = [Link("1gbit", 10.0), Link("10mbit", 0.0), Link(), Link("1gbit", 30.0)]
    assert modelled_ring_seconds(links, 1e6, messages=2) == pytest.approx(
        1.5 * 8e6 / 10e6 + 2 * 6 * 0.010
    )
    assert modelled_ring_seconds([Link()] * 4, 1e6) == 0.0


def test_the_shapers_bucket_is_two_milliseconds_and_holds_two_packets_at_least():
    words = Link("1gbit").shaper().split()
    assert words[:4] == ["tbf", "rate", "1000000000bit", "burst"]
    assert int(words[4]) == 250_000
    assert int(Link("1mbit").shaper().split()[4]) == 2 * 1514
