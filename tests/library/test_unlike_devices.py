"""Workers that round differently: which outer steps give all of them the same global model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.pages import code_blocks, page
from support.patience import patient

ROOT = Path(__file__).parent.parent.parent
KINDS = {"nesterov": "differed", "separate": "agreed", "average": "agreed"}
WORKER = """
import sys
import numpy as np
import torch
import torch.distributed as dist
import palsgd

rank, store, kinds = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.set_num_threads(1)
outers = {"nesterov": palsgd.nesterov(0.7, 0.9), "separate": SeparatelyRounded}

def trained(kind):
    random = np.random.default_rng(0)  # torch's own random numbers differ between instructions too
    model = torch.nn.Linear(40, 40)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(random.standard_normal(p.shape).astype("float32")))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "average":
        opt = palsgd.LocalSGD(model, inner, sync_every=3)
    else:
        opt = palsgd.PALSGD(model, inner, sync_every=3, mix_prob=0.3, outer=outers[kind])
    own = np.random.default_rng(1 + rank)
    batches = [torch.from_numpy(own.standard_normal((8, 40)).astype("float32")) for _ in range(7)]
    for batch in palsgd.until(batches, opt, steps=24):
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()

for kind in kinds:
    dist.init_process_group("gloo", init_method=f"file://{store}-{kind}", rank=rank, world_size=2)
    try:
        trained(kind)
        print("agreed", torch.backends.cpu.get_cpu_capability())
    except palsgd.ConsensusError as error:
        print("differed", torch.backends.cpu.get_cpu_capability(), error)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By kind, what two processes print, of which the first does without the newer instructions of
    this CPU. torch chooses them when it is imported."""
    folder = tmp_path_factory.mktemp("unlike")
    outer = next(block for block in code_blocks(page("docs/uneven.md")) if "SeparatelyR" in block)
    script = folder / "worker.py"
    script.write_text("import torch\n" + outer.partition("\n\n\nopt = ")[0] + WORKER)
    processes = []
    for rank, capability in enumerate(("default", "")):
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
        if capability:
            env["ATEN_CPU_CAPABILITY"] = capability
        command = [sys.executable, str(script), str(rank), str(folder / "store"), *KINDS]
        processes.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=patient(120)) for process in processes]
    assert [len(out.splitlines()) for out, _ in said] == [len(KINDS)] * 2, said
    return dict(zip(KINDS, zip(*(out.splitlines() for out, _ in said), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="no other instructions here",
)
@pytest.mark.parametrize(("kind", "word"), KINDS.items())
def test_outer_steps_that_are_rounded_one_by_one_agree_on_unlike_cpus(found, kind, word):
    older, newer = found[kind]
    assert older.startswith(f"{word} DEFAULT"), found
    assert newer.startswith(f"{word} AVX"), found
