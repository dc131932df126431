"""Examples with several processes: each runs, for a few steps, as its docstring says."""

import re
import sys

import pytest
import torch
import torch.distributed as dist

from palsgd.lab.links import Link, Network
from palsgd.tensor_files import parsed
from support.commands import apart, environment, ran, started
from support.namespaces import needs_namespaces
from support.patience import patient
from support.places import ROOT

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"


@pytest.fixture(params=["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"])
def device(request, monkeypatch):
    """Where the examples run: those on a CPU see no GPU."""
    if request.param == "CPU":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def torchrun(script, *words, processes=2):
    """What it prints, in lines."""
    done = apart(
        "--standalone", "--nproc-per-node", processes, EXAMPLES / script, *words,
        module="torch.distributed.run",
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.splitlines()


def saved_model(folder):
    path = folder / "model.safetensors"
    return parsed(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), str(path))[0]


def accuracy(line):
    return float(re.search(r"accuracy (\d\.\d+)", line)[1])


@needs_namespaces
def test_two_machines_train_over_a_real_network_and_send_a_part_of_what_ddp_sends():
    command = [sys.executable, str(EXAMPLES / "two_machines.py"), "--steps", "96"]
    env = {"PYTHONPATH": environment()["PYTHONPATH"], "CUDA_VISIBLE_DEVICES": ""}
    with Network(2, Link("50mbit")) as network:
        done = network.run(command, env=env, timeout=patient(120))
        sent = network.bytes_sent()
    ends = [each.stdout.splitlines()[-1] for each in done]
    assert [end.split(":")[0] for end in ends] == [f"worker {k} ends at clock 96" for k in (0, 1)]
    assert accuracy(ends[0]) == accuracy(ends[1]) > 0.8
    ddp = 1e6 * float(re.search(r"DDP would have sent (\S+) MB", done[0].stdout)[1])
    # Three rounds of a byte for each parameter, at the start a comparison, and what TCP adds.
    assert ddp / 400 < max(sent) < ddp / 20


def test_each_node_of_torchrun_is_one_worker(tmp_path, device):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = (
        "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint",
        f"127.0.0.1:{store.port}", "--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1",
        EXAMPLES / "several_nodes.py",
    )  # fmt: skip
    node = [tmp_path / f"node{number}" for number in (0, 1)]
    how = {"module": "torch.distributed.run"}
    with (
        started(*words, node[0], "--steps", 128, **how) as one,
        started(*words, node[1], "--steps", 128, **how) as other,
    ):
        said = [each.communicate(timeout=patient(120)) for each in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), said
    (line,) = re.findall("2 x 2 processes, .*", said[0][0] + said[1][0])
    assert accuracy(line) > 0.8
    models = [saved_model(each) for each in node]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_shards_inside_and_palsgd_between_workers_train_one_whole_model(tmp_path, device):
    words = (tmp_path, "--steps", 128, "--ranks-per-worker", 2)
    first, *ledger = torchrun("fsdp2.py", *words, processes=4)
    assert first.startswith("2 x 2 processes, ")
    assert accuracy(first) > 0.8
    assert any("exchanges" in line for line in ledger)
    assert saved_model(tmp_path)["0.0.weight"].shape == (128, 64)


def test_palsgd_goes_on_where_ddp_has_saved(tmp_path, device):
    words = (tmp_path / "run.pt", "--steps")
    (ddp,) = torchrun("from_ddp.py", "ddp", *words, 50)
    (palsgd,) = torchrun("from_ddp.py", "palsgd", *words, 64)
    before, after = (float(line.split()[1]) for line in (ddp, palsgd))
    assert after < before
    done = re.search(r"after 50 steps of DDP and 64 of PALSGD, (\d+) bytes", palsgd)
    # DDP sends 4,810 parameters in every step, and PALSGD in every sixteenth.
    assert int(done[1]) < 4 * 4810 / 10


def test_a_worker_that_is_killed_is_replaced_and_the_others_go_on(device):
    done = ran(EXAMPLES / "elastic.py", timeout=250)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert any("without (0,), 2 workers go on" in line for line in lines), done.out
    assert any("with (0,), there are 3 workers" in line for line in lines), done.out
    assert len({line.split("accuracy ")[1] for line in lines if "accuracy" in line}) == 1
    assert sum("ends at clock 1000" in line for line in lines) == 3
